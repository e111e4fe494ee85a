// Owns vectors of floats, bfloat16 in memory, and the few functions of them that a layer needs.
//
// Written with the compilers' vector extensions, so that the same lines serve AVX-512, AVX2 and
// NEON.

#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int VL = 16;  // floats in a vector
constexpr int MR = 12;  // rows of a product that are summed in registers, with two vectors each
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int MR = 6;
#else
constexpr int VL = 4;
constexpr int MR = 8;
#endif
constexpr int NR = 2 * VL;

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

struct bf16 {
  uint16_t bits;
};

inline vf splat(float x) { return x - vf{}; }

inline vf load(const float* from) {
  vf v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline vf load(const bf16* from) {
  vh half;
  std::memcpy(&half, from, sizeof half);
  return (vf)(__builtin_convertvector(half, vu) << 16);
}

// Nearest bfloat16, ties to even; NaN stays NaN.
inline vu rounded_bits(vf v) {
  vu bits = (vu)v;
  vu up = bits + 0x7fff + ((bits >> 16) & 1);
  return ((v == v) ? up : (vu)(bits | 0x400000)) >> 16;
}

inline void store(float* to, vf v) { std::memcpy(to, &v, sizeof v); }

inline void store(bf16* to, vf v) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)v);  // below 2^-126 it gives 0
#else
  vh half = __builtin_convertvector(rounded_bits(v), vh);
#endif
  std::memcpy(to, &half, sizeof half);
}

inline float wide(float x) { return x; }

inline float wide(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void narrow(float* to, float x) { *to = x; }

inline void narrow(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t up = bits + 0x7fff + ((bits >> 16) & 1);
  to->bits = (uint16_t)((x == x ? up : (bits | 0x400000)) >> 16);
}

// x as memory of T would have it.
template <class T>
inline float as_held(float x) {
  T t;
  narrow(&t, x);
  return wide(t);
}

inline vf as_held(vf v, const float*) { return v; }
inline vf as_held(vf v, const bf16*) { return (vf)(rounded_bits(v) << 16); }

inline float sum_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float lanes[VL];
  store(lanes, v);
  for (int width = VL / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }

inline float max_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float lanes[VL], most;
  store(lanes, v);
  most = lanes[0];
  for (int i = 1; i < VL; i++) most = std::max(most, lanes[i]);
  return most;
}

// e^x by Cephes' expf (Moshier): 2 ulp; exactly 1 at 0, from 89 on infinite.
inline vf exp_of(vf x) {
  x = larger(x, splat(-87.0f));
  x = -larger(-x, splat(-89.0f));  // above it the exponent would run into the sign
#if defined(__AVX512F__)
  vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 8);
#else
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  vf n = (x * 1.44269504088896341f + magic) - magic;
#endif
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return y * (vf)power;
#endif
}
