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

constexpr int64_t BLOCK = 32;       // outputs
constexpr int64_t AHEAD = 2048;     // numbers of a weight that are asked for before they are needed
constexpr int64_t CHUNK = 1 << 20;  // bytes of rows that go through a block together: half an L2

// A quantised weight (bits 8 or 4) is [blocks][k / 2][32 outputs][2 inputs]: an int8 each, or the
// two inputs in one byte, low half first. scales: of 8 bits float [outputs]: W = q * scale; of 4
// bits bfloat16 [blocks][k / 32][2][32], for 32 inputs: W = (q - 8) * scale + zero. It is made a
// block of the operand's numbers before it is used.
struct Packed {
  const void* weight;
  const void* scales;
  int64_t bits;       // 0: as memory has them
  const float* bias;  // [outputs, padded to whole blocks] or null
  int64_t outputs;
  int64_t inputs;
};

inline int64_t blocks_of(int64_t outputs) { return (outputs + BLOCK - 1) / BLOCK; }

// ---- sums in vectors ----

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

// ---- sums in tiles of AMX ----

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

inline void begin_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Inputs [0, k) of one block of outputs and up to 32 rows, on top of what the sums are.
inline void add_to_sums(const bf16* x, int64_t lda, int64_t rows, const bf16* weight, int64_t k) {
  const int64_t stride = lda * 2;
  if (rows > 16) {
    const bf16* below = x + 16 * lda;
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
  } else {
    for (int64_t i = 0; i < k; i += 32, weight += 1024) {
      _tile_loadd(4, x + i, stride);
      _tile_loadd(6, weight, 64);
      _tile_loadd(7, weight + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
}

inline void end_sums(int64_t rows, float* sums) {  // [32][32]
  _tile_stored(0, sums, BLOCK * 4);
  _tile_stored(1, sums + 16, BLOCK * 4);
  if (rows > 16) {
    _tile_stored(2, sums + 16 * BLOCK, BLOCK * 4);
    _tile_stored(3, sums + 16 * BLOCK + 16, BLOCK * 4);
  }
}

#endif

// ---- either ----

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

// 32 inputs of one block of a quantised weight as operands; 8 bits without their scale, which is
// exact. group: scales and zeros of 4 bits.
inline void unpack(const uint8_t* from, int64_t bits, const bf16* group, float* to) {
  for (int64_t i = 0; i < 32; i += 2, from += BLOCK * 2 * bits / 8, to += 2 * BLOCK)
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
inline void unpack(const uint8_t* from, int64_t bits, const bf16* group, bf16* to) {
  alignas(64) static const uint16_t places[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                  21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                  11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i alternate = _mm512_load_si512(places), low_half = _mm512_set1_epi32(15);
  for (int64_t half = 0; half < 2; half++, to += 512) {
    if (bits == 8) {
      for (int64_t i = 0; i < 16; i++) {
        const __m128i* at = (const __m128i*)(from + i * 64 + half * 32);
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        _mm512_store_si512(to + i * 32, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      continue;
    }
    const __m512 scale = (__m512)load(group + half * 16);
    const __m512 zero = (__m512)load(group + BLOCK + half * 16);
    const __m512 first = _mm512_fnmadd_ps(_mm512_set1_ps(8.0f), scale, zero);
    for (int64_t i = 0; i < 16; i++) {
      const __m128i* at = (const __m128i*)(from + i * 32 + half * 16);
      __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(at));
      __m512 low = _mm512_cvtepi32_ps(_mm512_and_si512(both, low_half));
      __m512 high = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
      __m512i made = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, scale, first),
                                                  _mm512_fmadd_ps(low, scale, first));
      _mm512_store_si512(to + i * 32, _mm512_permutexvar_epi16(alternate, made));
    }
  }
}
#endif

// Inputs [first, last) of a block of a quantised weight as operands, at `to`; multiples of 32.
template <class O>
inline void unpack_some(const Packed& p, int64_t block, int64_t first, int64_t last, O* to) {
  const int64_t k = p.inputs, bytes = BLOCK * 32 * p.bits / 8;
  const uint8_t* from = (const uint8_t*)p.weight + block * BLOCK * k * p.bits / 8;
  const bf16* groups = (const bf16*)p.scales + block * (k / 32) * 2 * BLOCK;
  for (int64_t i = first; i < last; i += 32, to += 32 * BLOCK) {
    const uint8_t* at = from + i / 32 * bytes;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + 2 * AHEAD + line);
    unpack(at, p.bits, groups + i / 32 * 2 * BLOCK, to);
  }
}

template <class O>
inline const O* unpacked(const Packed& p, int64_t block, std::vector<O>& memory) {
  const int64_t k = p.inputs;
  if ((int64_t)memory.size() < k * BLOCK + 32) memory.resize(k * BLOCK + 32);
  O* to = (O*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  unpack_some(p, block, 0, k, to);
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
      begin_sums();
      add_to_sums(x + row * lda, lda, count, weight, packed.inputs);
      end_sums(count, sums);
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

#ifdef KVRING_AMX
// block_of for few rows of a quantised weight: what was made an operand is used from the nearest
// cache.
template <class Each>
inline void few_rows(const bf16* x, int64_t lda, int64_t rows, const Packed& packed, int64_t block,
                     int64_t& configured, const Each& each) {
  constexpr int64_t SOME = 128;
  alignas(64) bf16 made[2][SOME * BLOCK];
  alignas(64) float sums[BLOCK * BLOCK];
  if (rows != configured) {
    configure((int)std::min<int64_t>(rows, 16), (int)(rows - 16));
    configured = rows;
  }
  begin_sums();
  for (int64_t i = 0; i < packed.inputs; i += SOME) {
    const int64_t last = std::min(i + SOME, packed.inputs);
    bf16* to = made[i / SOME % 2];
    unpack_some(packed, block, i, last, to);
    add_to_sums(x + i, lda, rows, to, last - i);
  }
  end_sums(rows, sums);
  hand_over(0, rows, block, packed, sums, each);
}
#endif

// Calls each(row, block, sums) with the 32 sums of every row and every block of this thread's
// share.
template <class T, class Each>
void product(const operand<T>* x, int64_t lda, int64_t rows, const Packed& packed,
             const Each& each) {
  static thread_local std::vector<operand<T>> made;
  const int64_t k = packed.inputs;
  int64_t first, last;
  share_of(blocks_of(packed.outputs), first, last);
  const int64_t chunk = std::max(BLOCK, CHUNK / (k * (int64_t)sizeof(*x)) / BLOCK * BLOCK);
  int64_t configured = 0;
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t stop = std::min(start + chunk, rows);
    for (int64_t block = first; block < last; block++) {
#ifdef KVRING_AMX
      if constexpr (sizeof(*x) == 2) {
        if (packed.bits && rows <= BLOCK) {
          few_rows(x, lda, rows, packed, block, configured, each);
          continue;
        }
      }
#endif
      if (packed.bits)
        block_of(x, lda, start, stop, unpacked(packed, block, made), packed, block, configured,
                 each);
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
