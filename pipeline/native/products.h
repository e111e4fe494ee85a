// Owns products of rows with a packed weight: y = x W^T, every row by the same sums.
//
// A packed weight is blocks of 32 outputs, so that one is read from its first byte to its last: for
// AMX [k / 32][2][16 pairs of inputs][16 outputs][2] bfloat16, else [k][32] floats or bfloat16. An
// output is one chain of sums over the inputs in their order, however many rows share a call.

#pragma once

#include <omp.h>

#include <vector>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && !defined(KVRING_NO_AMX)
#define KVRING_AMX 1
#include <immintrin.h>
#endif

constexpr int64_t BLOCK = 32;     // outputs
constexpr int64_t AHEAD = 2048;   // numbers of a weight that are asked for before they are needed
constexpr int64_t CHUNK = 1 << 20;  // bytes of rows that go through a block together: half an L2

// A quantised weight (bits 8 or 4) is [blocks][k / 2][32 outputs][2 inputs]: an int8 each, or the two
// inputs in one byte, low half first. scales: of 8 bits float [outputs]: W = q * scale; of 4 bits
// bfloat16 [blocks][k / 32][2][32], for 32 inputs: W = (q - 8) * scale + zero. It is made a block of
// the operand's numbers before it is used.
struct Packed {
  const void* weight;
  const void* scales;
  int64_t bits;  // 0: as memory has them
  const float* bias;  // [outputs, padded to whole blocks] or null
  int64_t outputs;
  int64_t inputs;
};

inline int64_t blocks_of(int64_t outputs) { return (outputs + BLOCK - 1) / BLOCK; }

// ---- sums in vectors ------------------------------------------------------------------------------

// C [M, NR] = (add ? C : 0) + A [M, k] B [k, NR].
template <int M, class W>
inline void tile(const float* a, int64_t lda, const W* b, int64_t ldb, int64_t k, float* c,
                 int64_t ldc, bool add) {
  vf sums[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) {
    sums[m][0] = add ? load(c + m * ldc) : vf{};
    sums[m][1] = add ? load(c + m * ldc + VL) : vf{};
  }
  for (int64_t i = 0; i < k; i++) {
    __builtin_prefetch(b + i * ldb + AHEAD);
    __builtin_prefetch(b + i * ldb + AHEAD + VL);
    vf b0 = load(b + i * ldb), b1 = load(b + i * ldb + VL);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf x = splat(a[m * lda + i]);
      sums[m][0] += x * b0;
      sums[m][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) {
    store(c + m * ldc, sums[m][0]);
    store(c + m * ldc + VL, sums[m][1]);
  }
}

template <class W, int M = MR>
inline void tile_of(int64_t rows, const float* a, int64_t lda, const W* b, int64_t ldb, int64_t k,
                    float* c, int64_t ldc, bool add) {
  if constexpr (M > 0) {
    if (rows == M)
      tile<M>(a, lda, b, ldb, k, c, ldc, add);
    else
      tile_of<W, M - 1>(rows, a, lda, b, ldb, k, c, ldc, add);
  }
}

// C [rows, n] = (add ? C : 0) + A [rows, k] B [k, n]; n a multiple of NR.
template <class W>
inline void multiply(const float* a, int64_t lda, int64_t rows, const W* b, int64_t ldb, int64_t n,
                     int64_t k, float* c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n; j += NR)
    for (int64_t r = 0; r < rows; r += MR)
      tile_of<W>(std::min<int64_t>(MR, rows - r), a + r * lda, lda, b + j, ldb, k, c + r * ldc + j,
                 ldc, add);
}

// ---- sums in tiles of AMX -------------------------------------------------------------------------

#ifdef KVRING_AMX

struct alignas(64) Tiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums (two of `first` rows, two of `second`), 4 and 5 rows, 6 and 7 weights.
inline void configure(int first, int second) {
  Tiles tiles;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; i++) {
    tiles.bytes[i] = 64;
    tiles.rows[i] = (uint8_t)std::max(rows[i], 1);
  }
  _tile_loadconfig(&tiles);
}

// One block of outputs of up to 32 rows: sums [32][32].
inline void amx_block(const bf16* x, int64_t lda, int64_t rows, const bf16* weight, int64_t k,
                      float* sums) {
  const int64_t stride = lda * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (rows > 16) {
    const bf16* below = x + 16 * lda;
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += 32, weight += 1024) {
      for (int line = 0; line < 32; line++) __builtin_prefetch(weight + AHEAD + line * 32);
      _tile_loadd(4, x + i, stride);
      _tile_loadd(6, weight, 64);
      _tile_loadd(7, weight + 512, 64);
      _tile_loadd(5, below + i, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + 16 * BLOCK, BLOCK * 4);
    _tile_stored(3, sums + 16 * BLOCK + 16, BLOCK * 4);
  } else {
    for (int64_t i = 0; i < k; i += 32, weight += 1024) {
      _tile_loadd(4, x + i, stride);
      _tile_loadd(6, weight, 64);
      _tile_loadd(7, weight + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sums, BLOCK * 4);
  _tile_stored(1, sums + 16, BLOCK * 4);
}

#endif

// ---- either ---------------------------------------------------------------------------------------

// What rows are multiplied as, when T is what memory holds.
template <class T>
struct Operand {
  using type = float;
};
#ifdef KVRING_AMX
template <>
struct Operand<bf16> {
  using type = bf16;
};
#endif
template <class T>
using operand = typename Operand<T>::type;

// This thread's share of `count` things: [first, last).
inline void share_of(int64_t count, int64_t& first, int64_t& last) {
  int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  first = count * thread / threads;
  last = count * (thread + 1) / threads;
}

// Two inputs of one block of a quantised weight as operands; 8 bits without their scale, which is
// exact. group: scales and zeros of 4 bits.
inline void unpack(const uint8_t* from, int64_t bits, const bf16* group, int64_t i, float* to) {
  to += i * BLOCK;
  for (int64_t o = 0; o < BLOCK; o++) {
    if (bits == 8) {
      to[o] = (float)(int8_t)from[2 * o];
      to[o + BLOCK] = (float)(int8_t)from[2 * o + 1];
    } else {
      const float scale = wide(group[o]), zero = wide(group[BLOCK + o]);
      to[o] = (float)((from[o] & 15) - 8) * scale + zero;
      to[o + BLOCK] = (float)((from[o] >> 4) - 8) * scale + zero;
    }
  }
}

#ifdef KVRING_AMX
inline void unpack(const uint8_t* from, int64_t bits, const bf16* group, int64_t i, bf16* to) {
  to += i / 32 * 1024 + i % 32 / 2 * 32;
  for (int64_t half = 0; half < 2; half++, to += 512) {
    __m512i row;
    if (bits == 8) {
      const __m128i* at = (const __m128i*)(from + half * 32);
      __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
      __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
      row = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    } else {
      const __m512i eight = _mm512_set1_epi32(8), low_half = _mm512_set1_epi32(15);
      __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + half * 16)));
      __m512 scale = (__m512)load(group + half * 16), zero = (__m512)load(group + BLOCK + half * 16);
      __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(both, low_half), eight));
      __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(both, 4), eight));
      auto rounded = [&](__m512 numbers) {
        return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(numbers, scale, zero)));
      };
      row = _mm512_or_si512(rounded(low), _mm512_slli_epi32(rounded(high), 16));
    }
    _mm512_store_si512(to, row);
  }
}
#endif

// A block of a quantised weight as operands, in `memory`.
template <class O>
inline const O* unpacked(const Packed& p, int64_t block, std::vector<O>& memory) {
  const int64_t k = p.inputs, row = BLOCK * 2 * p.bits / 8;
  if ((int64_t)memory.size() < k * BLOCK + 32) memory.resize(k * BLOCK + 32);
  O* to = (O*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  const uint8_t* from = (const uint8_t*)p.weight + block * BLOCK * k * p.bits / 8;
  const bf16* groups = (const bf16*)p.scales + block * (k / 32) * 2 * BLOCK;
  for (int64_t i = 0; i < k; i += 2, from += row) {
    __builtin_prefetch(from + 2 * AHEAD);
    unpack(from, p.bits, groups + i / 32 * 2 * BLOCK, i, to);
  }
  return to;
}

template <class Each>
inline void hand_over(int64_t row, int64_t count, int64_t block, const Packed& p, float* sums,
                      const Each& each) {
  for (int64_t i = 0; i < count; i++) {
    float* of_row = sums + i * BLOCK;
    if (p.bits == 8)
      for (int64_t o = 0; o < BLOCK; o += VL)
        store(of_row + o, load(of_row + o) * load((const float*)p.scales + block * BLOCK + o));
    each(row + i, block, of_row);
  }
}

// One block of outputs of rows [start, stop). configured: rows that the tiles are set for.
template <class O, class W, class Each>
inline void block_of(const O* x, int64_t lda, int64_t start, int64_t stop, const W* weight,
                     const Packed& packed, int64_t block, int64_t& configured, const Each& each) {
  alignas(64) float sums[BLOCK * BLOCK];
#ifdef KVRING_AMX
  if constexpr (sizeof(O) == 2) {
    for (int64_t row = start; row < stop; row += BLOCK) {
      const int64_t count = std::min(BLOCK, stop - row);
      if (count != configured) {
        configure((int)std::min<int64_t>(count, 16), (int)(count - 16));
        configured = count;
      }
      amx_block(x + row * lda, lda, count, weight, packed.inputs, sums);
      hand_over(row, count, block, packed, sums, each);
    }
    return;
  }
#endif
  if constexpr (sizeof(O) == 4) {
    for (int64_t row = start; row < stop; row += MR) {
      const int64_t count = std::min<int64_t>(MR, stop - row);
      multiply(x + row * lda, lda, count, weight, BLOCK, BLOCK, packed.inputs, sums, BLOCK, false);
      hand_over(row, count, block, packed, sums, each);
    }
  }
}

// Calls each(row, block, sums) with the 32 sums of every row and every block of this thread's share.
template <class T, class Each>
void product(const operand<T>* x, int64_t lda, int64_t rows, const Packed& packed, const Each& each) {
  static thread_local std::vector<operand<T>> made;
  const int64_t k = packed.inputs;
  int64_t first, last;
  share_of(blocks_of(packed.outputs), first, last);
  const int64_t chunk = std::max(BLOCK, CHUNK / (k * (int64_t)sizeof(*x)) / BLOCK * BLOCK);
  int64_t configured = 0;
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t stop = std::min(start + chunk, rows);
    for (int64_t block = first; block < last; block++) {
      if (packed.bits)
        block_of(x, lda, start, stop, unpacked(packed, block, made), packed, block, configured, each);
      else
        block_of(x, lda, start, stop, (const T*)packed.weight + block * BLOCK * k, packed, block,
                 configured, each);
    }
  }
}

// Where input i of output o lies in a packed weight of k inputs.
template <class T>
inline int64_t place_of(int64_t o, int64_t i, int64_t k) {
  const int64_t base = o / BLOCK * BLOCK * k, within = o % BLOCK;
  if constexpr (sizeof(operand<T>) == 2)
    return base + i / 32 * 1024 + within / 16 * 512 + i % 32 / 2 * 32 + within % 16 * 2 + i % 2;
  return base + i * BLOCK + within;
}
