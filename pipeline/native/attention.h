// Owns attention of some tokens of one slot: softmax(q k^T * scaling) v, a row by the same sums
// whatever tokens share the call.
//
// Blocks of 256 keys from key 0 on, with a running maximum and sum for each row (Milakov and
// Gimelshein 2018, Online normalizer calculation for softmax; as in FlashAttention, Dao et al.
// 2022). A key that a row may not see adds an exact 0.

#pragma once

#include <vector>

#include "products.h"

constexpr int64_t KEYS = 256;              // of a block
constexpr int64_t KEY_STRIDE = KEYS + 16;  // of turned keys: 1 KB would share one set of an L1
constexpr int64_t TILE = 16;               // query rows at a time
constexpr int64_t ROWS = 128;  // about so many query rows see a block that was made ready once

struct Heads {
  int64_t heads, groups, size, capacity;
  int64_t window;      // keys that a row sees, or 0: all
  const float* sinks;  // [heads], one more logit in each row's sum, without a value; or null
  float scaling;
};

struct Part {
  int64_t slot, start, end;  // rows of the slot
  int64_t at;                // of the first in the frame
};

inline int64_t up_to(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Tokens of a part that are one task.
inline int64_t tokens_of(const Heads& h) {
  return std::max<int64_t>(1, ROWS / (h.heads / h.groups));
}

// A thread's memory for one task.
template <class O>
struct Bench {
  float *scores, *out, *most, *sum;
  O *query, *keys, *values, *weights;

  Bench(int64_t rows, int64_t width) {
    static thread_local std::vector<float> memory;
    const int64_t o = sizeof(O);
    const int64_t sizes[8] = {TILE * KEYS * 4,  rows * width * 4, rows * 4,
                              rows * 4,         rows * width * o, KEY_STRIDE * width * o,
                              KEYS * width * o, TILE * KEYS * o};
    int64_t whole = 16;
    for (int64_t size : sizes) whole += up_to(size, 64) / 4;
    if ((int64_t)memory.size() < whole) memory.resize(whole);
    char* at = (char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    void* places[8];
    for (int i = 0; i < 8; i++) {
      places[i] = at;
      at += up_to(sizes[i], 64);
    }
    scores = (float*)places[0], out = (float*)places[1], most = (float*)places[2],
    sum = (float*)places[3], query = (O*)places[4], keys = (O*)places[5], values = (O*)places[6],
    weights = (O*)places[7];
  }
};

// Weights of keys [low, high) of a block; the others of `width` are 0. Returns what earlier sums
// have to be multiplied by.
template <class O>
inline float soften(const float* scores, O* weights, int64_t width, int64_t low, int64_t high,
                    float scaling, float& most, float& sum) {
  const vf hidden = splat(-1e30f);
  vi lane;
  for (int i = 0; i < VL; i++) lane[i] = i;
  const auto seen = [&](int64_t j, vf x, vf otherwise) {
    if (j >= low && j + VL <= high) return x;
    vi at = lane + (int32_t)j;
    return (at >= (int32_t)low) & (at < (int32_t)high) ? x : otherwise;
  };
  vf top = hidden;
  for (int64_t j = 0; j < width; j += VL)
    top = larger(top, seen(j, load(scores + j) * scaling, hidden));
  const float now = std::max(most, max_of(top));
  vf total{};
  for (int64_t j = 0; j < width; j += VL) {
    vf x = seen(j, exp_of(load(scores + j) * scaling - now), vf{});
    total += x;
    store(weights + j, x);
  }
  const float before = exp_of(splat(std::max(most - now, -87.0f)))[0];
  most = now;
  sum = sum * before + sum_of(total);
  return before;
}

#ifdef KVRING_AMX

// 16 rows of 32 numbers (those of `mask`; else 0) as one tile of weights: pairs of inputs by
// output.
inline void turn(const bf16* from, int64_t stride, __mmask32 mask, bf16* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi16(mask, from + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    _mm512_storeu_si512(to + i * 32, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 8) * 32, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
  }
}

inline void ready(const Heads& h, const bf16* k, const bf16* v, int64_t count, Bench<bf16>& bench) {
  const int64_t steps = up_to(h.size, 32) / 32, tiles = h.size / 16;
  for (int64_t key = 0; key < count; key += 16)
    for (int64_t step = 0; step < steps; step++) {
      const int64_t left = h.size - step * 32;
      turn(k + key * h.size + step * 32, h.size, left < 32 ? 0xffff : 0xffffffff,
           bench.keys + (key / 16 * steps + step) * 512);
    }
  for (int64_t pair = 0; pair < count / 2; pair++)
    for (int64_t t = 0; t < tiles; t++) {
      const bf16* from = v + pair * 2 * h.size + t * 16;
      __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
      __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(from + h.size)));
      _mm512_store_si512(bench.values + ((pair / 16 * tiles + t) * 16 + pair % 16) * 32,
                         _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
}

// Tiles 0 to 3 = (add ? to : 0) + rows x up to four tiles of weights, each `apart` from the next.
inline void tiles_of(int64_t tiles, const bf16* rows, int64_t stride, int64_t steps,
                     const bf16* weights, int64_t apart, int64_t step, float* to, int64_t to_stride,
                     bool add) {
  const int64_t bytes = to_stride * 4;
  if (add) {
    _tile_loadd(0, to, bytes);
    if (tiles > 1) _tile_loadd(1, to + 16, bytes);
    if (tiles > 2) _tile_loadd(2, to + 32, bytes);
    if (tiles > 3) _tile_loadd(3, to + 48, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; i++, weights += step) {
    _tile_loadd(4, rows + i * 32, stride * 2);
    _tile_loadd(5, weights, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (tiles > 1) {
      _tile_loadd(6, weights + apart, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (tiles > 2) {
      _tile_loadd(7, weights + 2 * apart, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (tiles > 3) {
      _tile_loadd(5, weights + 3 * apart, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, to, bytes);
  if (tiles > 1) _tile_stored(1, to + 16, bytes);
  if (tiles > 2) _tile_stored(2, to + 32, bytes);
  if (tiles > 3) _tile_stored(3, to + 48, bytes);
}

inline void scores_of(const Heads&, const bf16* query, int64_t, int64_t width, int64_t count,
                      Bench<bf16>& bench) {
  const int64_t steps = width / 32, tiles = count / 16;
  for (int64_t t = 0; t < tiles; t += 4)
    tiles_of(std::min<int64_t>(4, tiles - t), query, width, steps, bench.keys + t * steps * 512,
             steps * 512, 512, bench.scores + t * 16, KEYS, false);
}

inline void add_values(const Heads& h, float* out, int64_t, int64_t width, int64_t count,
                       Bench<bf16>& bench) {
  const int64_t tiles = h.size / 16;
  for (int64_t t = 0; t < tiles; t += 4)
    tiles_of(std::min<int64_t>(4, tiles - t), bench.weights, KEYS, count / 32,
             bench.values + t * 512, 512, tiles * 512, out + t * 16, width, true);
}

#endif

template <class T>
inline void ready(const Heads& h, const T* k, const T* v, int64_t count, Bench<float>& bench) {
  constexpr int64_t SOME = 8;  // a line of the target is written whole while it is in the cache
  for (int64_t i = 0; i < h.size; i += SOME)
    for (int64_t key = 0; key < count; key++)
      for (int64_t j = i; j < i + SOME; j++)
        bench.keys[j * KEY_STRIDE + key] = wide(k[key * h.size + j]);
  const int64_t width = up_to(h.size, BLOCK);
  for (int64_t key = 0; key < count; key++)
    for (int64_t i = 0; i < h.size; i++) bench.values[key * width + i] = wide(v[key * h.size + i]);
}

inline void scores_of(const Heads& h, const float* query, int64_t rows, int64_t width,
                      int64_t count, Bench<float>& bench) {
  multiply(query, width, rows, bench.keys, KEY_STRIDE, count, h.size, bench.scores, KEYS, false);
}

inline void add_values(const Heads&, float* out, int64_t rows, int64_t width, int64_t count,
                       Bench<float>& bench) {
  multiply(bench.weights, KEYS, rows, bench.values, width, width, count, out, width, true);
}

// What a row's values are multiplied by at the end.
inline float share_of_row(float most, float sum, const float* sink) {
  if (!sink) return 1.0f / sum;
  const float top = std::max(most, *sink);
  const float kept = exp_of(splat(std::max(most - top, -87.0f)))[0];
  return kept / (sum * kept + exp_of(splat(std::max(*sink - top, -87.0f)))[0]);
}

// Tokens [first, last) of a part, all query heads of key head `index`. q: of the part's first token
// and the group's first head, with strides; keys, values: of the slot's key head; to: likewise.
template <class T, class To>
void attend(const Heads& h, const Part& part, int64_t index, int64_t first, int64_t last,
            const T* q, int64_t head_stride, int64_t row_stride, const T* keys, const T* values,
            To* to, int64_t to_stride) {
  using O = operand<T>;
  const int64_t group = h.heads / h.groups, width = up_to(h.size, BLOCK);
  const int64_t rows = (last - first) * group, tiled = up_to(rows, TILE);
  Bench<O> bench(up_to(tokens_of(h) * group, TILE), width);
  std::memset(bench.query, 0, tiled * width * sizeof(O));
  std::memset(bench.out, 0, tiled * width * 4);
  for (int64_t r = 0; r < rows; r++) {
    const T* from = q + (first + r / group) * row_stride + r % group * head_stride;
    for (int64_t i = 0; i < h.size; i++) narrow(bench.query + r * width + i, wide(from[i]));
    bench.most[r] = -1e30f;
    bench.sum[r] = 0;
  }
  const int64_t end = part.start + last;  // keys below it are seen by someone
  int64_t begin = 0;
  if (h.window) begin = std::max<int64_t>(0, part.start + first + 1 - h.window) / KEYS * KEYS;
  for (int64_t block = begin; block < end; block += KEYS) {
    const int64_t ready_keys = up_to(std::min(KEYS, end - block), BLOCK);
    ready(h, keys + block * h.size, values + block * h.size, ready_keys, bench);
    for (int64_t r = 0; r < rows; r += TILE) {
      const int64_t bottom = std::min(r + TILE, rows);
      const int64_t seen = part.start + first + (bottom - 1) / group + 1 - block;
      if (seen <= 0) continue;
      const int64_t count = std::min(ready_keys, up_to(seen, BLOCK));
      scores_of(h, bench.query + r * width, bottom - r, width, count, bench);
      for (int64_t i = r; i < bottom; i++) {
        const int64_t high = part.start + first + i / group + 1 - block;
        const int64_t low = h.window ? high - h.window : 0;
        const float before = soften(bench.scores + (i - r) * KEYS, bench.weights + (i - r) * KEYS,
                                    count, low, high, h.scaling, bench.most[i], bench.sum[i]);
        if (before != 1.0f)
          for (int64_t j = 0; j < width; j += VL)
            store(bench.out + i * width + j, load(bench.out + i * width + j) * before);
      }
      add_values(h, bench.out + r * width, bottom - r, width, count, bench);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    To* row = to + (first + r / group) * to_stride + r % group * h.size;
    const float* sink = h.sinks ? h.sinks + index * group + r % group : nullptr;
    const float one = share_of_row(bench.most[r], bench.sum[r], sink);
    for (int64_t i = 0; i < h.size; i++)
      narrow(row + i, as_held<T>(bench.out[r * width + i] * one + 0.0f));
  }
}
