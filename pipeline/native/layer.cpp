// Owns a decoder layer of the llama kind over the rows of one forward, in one call, and its parts
// alone. pipeline/native/library.py calls it; T is what memory holds, float or bfloat16.

#include <cmath>

#include "attention.h"

#ifdef KVRING_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct Layer {
  Heads heads;
  int64_t width, inner;
  float eps;
  const void *norm, *norm_2, *query_norm, *key_norm;  // [width] or [size]; of heads: or null
  Packed qkv, out, gate_up, down;
};

struct Step {
  int64_t rows, parts;
  const Part* part;
  void* hidden;           // [rows, width], overwritten
  const void *cos, *sin;  // [rows, size]
  void *keys, *values;    // [slots, groups, capacity, size]
  void* scratch;          // see scratch_bytes
  int64_t threads;
};

namespace {

constexpr int64_t GAP = 32;  // numbers behind a row: rows 4 KB apart share one set of an L1 cache

template <class T>
struct Scratch {
  operand<T>*normed, *found, *gated;
  T* qkv;
  int64_t normed_stride, found_stride, gated_stride, qkv_stride, bytes;

  Scratch(const Layer& l, int64_t rows, void* memory) {
    const Heads& h = l.heads;
    normed_stride = l.width + GAP;
    found_stride = h.heads * h.size + GAP;
    gated_stride = l.inner + GAP;
    qkv_stride = up_to((h.heads + 2 * h.groups) * h.size, BLOCK) + GAP;
    char* at = (char*)memory;
    auto take = [&](int64_t size) {
      char* from = at;
      at += up_to(size, 64);
      return from;
    };
    const int64_t o = sizeof(operand<T>);
    normed = (operand<T>*)take(rows * normed_stride * o);
    found = (operand<T>*)take(rows * found_stride * o);
    gated = (operand<T>*)take(rows * gated_stride * o);
    qkv = (T*)take(rows * qkv_stride * sizeof(T));
    bytes = at - (char*)memory;
  }
};

// RMS norm (Zhang and Sennrich 2019), rounded to T before and after the weight as the library's.
template <class T, class To>
void normalise(const T* x, const T* weight, float eps, int64_t width, To* to) {
  vf squares{};
  for (int64_t i = 0; i < width; i += VL) {
    vf v = load(x + i);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / (float)width + eps);
  for (int64_t i = 0; i < width; i += VL) {
    vf v = as_held(load(x + i) * scale, (const T*)0) * load(weight + i);
    store(to + i, as_held(v, (const T*)0));
  }
}

// Rotary embedding in place (Su et al. 2021); the halves of a head turn as one pair.
template <class T>
void turn_head(T* x, const T* cos, const T* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const float low = wide(x[i]), high = wide(x[i + half]);
    narrow(x + i, low * wide(cos[i]) - high * wide(sin[i]));
    narrow(x + i + half, high * wide(cos[i + half]) + low * wide(sin[i + half]));
  }
}

// One row's heads: normed where the layer has head norms, turned, keys and values to their slot.
template <class T>
void place_row(const Layer& l, const Step& s, const Part& part, int64_t offset, T* row) {
  const Heads& h = l.heads;
  const int64_t position = part.start + offset;
  const int64_t turn = (part.at + offset) * h.size;
  const T *cos = (const T*)s.cos + turn, *sin = (const T*)s.sin + turn;
  for (int64_t i = 0; i < h.heads + h.groups; i++) {
    const T* norm = (const T*)(i < h.heads ? l.query_norm : l.key_norm);
    if (norm) normalise(row + i * h.size, norm, l.eps, h.size, row + i * h.size);
    turn_head(row + i * h.size, cos, sin, h.size);
  }
  const T* made = row + h.heads * h.size;
  for (int64_t g = 0; g < h.groups; g++) {
    const int64_t to = ((part.slot * h.groups + g) * h.capacity + position) * h.size;
    std::memcpy((T*)s.keys + to, made + g * h.size, h.size * sizeof(T));
    std::memcpy((T*)s.values + to, made + (h.groups + g) * h.size, h.size * sizeof(T));
  }
}

// All parts' attention, in tasks of some tokens and one key head; called by every thread.
template <class T, class To>
void attend_all(const Heads& h, const Part* parts, int64_t count, const T* query,
                int64_t head_stride, int64_t row_stride, const void* keys, const void* values,
                To* to, int64_t to_stride) {
#ifdef KVRING_AMX
  configure(16, 16);
#endif
  const int64_t tokens = tokens_of(h), group = h.heads / h.groups;
  int64_t tasks = 0;
  for (int64_t p = 0; p < count; p++)
    tasks += (parts[p].end - parts[p].start + tokens - 1) / tokens * h.groups;
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; task++) {
    int64_t left = task, p = 0, cuts;
    while (left >= (cuts = (parts[p].end - parts[p].start + tokens - 1) / tokens) * h.groups) {
      left -= cuts * h.groups;
      p++;
    }
    const Part& part = parts[p];
    const int64_t g = left % h.groups, first = left / h.groups * tokens;
    const int64_t last = std::min(first + tokens, part.end - part.start);
    const int64_t slot = (part.slot * h.groups + g) * h.capacity * h.size;
    attend(h, part, g, first, last, query + part.at * row_stride + g * group * head_stride,
           head_stride, row_stride, (const T*)keys + slot, (const T*)values + slot,
           to + part.at * to_stride + g * group * h.size, to_stride);
  }
}

inline vf biased(const Packed& p, int64_t output, const float* sums, int64_t i) {
  vf v = load(sums + i);
  return p.bias ? v + load(p.bias + output + i) : v;
}

template <class T>
struct AddTo {  // the sums to rows that are there
  const Packed& p;
  T* rows;
  int64_t stride;

  void operator()(int64_t row, int64_t block, const float* sums) const {
    T* to = rows + row * stride + block * BLOCK;
    for (int64_t i = 0; i < BLOCK; i += VL)
      store(to + i, load(to + i) + as_held(biased(p, block * BLOCK, sums, i), (const T*)0));
  }
};

template <class T>
void run_layer(const Layer& l, const Step& s) {
  const Scratch<T> at(l, s.rows, s.scratch);
  T* hidden = (T*)s.hidden;
  auto norm_rows = [&](const void* weight) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s.rows; r++)
      normalise(hidden + r * l.width, (const T*)weight, l.eps, l.width,
                at.normed + r * at.normed_stride);
  };
#pragma omp parallel num_threads((int)s.threads)
  {
    norm_rows(l.norm);
    product<T>(at.normed, at.normed_stride, s.rows, l.qkv,
               [&](int64_t row, int64_t block, const float* sums) {
                 T* to = at.qkv + row * at.qkv_stride + block * BLOCK;
                 for (int64_t i = 0; i < BLOCK; i += VL)
                   store(to + i, biased(l.qkv, block * BLOCK, sums, i));
               });
#pragma omp barrier
    for (int64_t p = 0; p < s.parts; p++) {
      const Part& part = s.part[p];
#pragma omp for schedule(static)
      for (int64_t i = 0; i < part.end - part.start; i++)
        place_row(l, s, part, i, at.qkv + (part.at + i) * at.qkv_stride);
    }
    attend_all(l.heads, s.part, s.parts, at.qkv, l.heads.size, at.qkv_stride, s.keys, s.values,
               at.found, at.found_stride);
    product<T>(at.found, at.found_stride, s.rows, l.out, AddTo<T>{l.out, hidden, l.width});
#pragma omp barrier
    norm_rows(l.norm_2);
    product<T>(at.normed, at.normed_stride, s.rows, l.gate_up,
               [&](int64_t row, int64_t block, const float* sums) {
                 operand<T>* to = at.gated + row * at.gated_stride + block * (BLOCK / 2);
                 for (int64_t i = 0; i < BLOCK / 2; i += VL) {
                   vf gate = as_held(biased(l.gate_up, block * BLOCK, sums, i), (const T*)0);
                   vf up =
                       as_held(biased(l.gate_up, block * BLOCK, sums, i + BLOCK / 2), (const T*)0);
                   vf silu = as_held(gate / (1.0f + exp_of(-gate)), (const T*)0);
                   store(to + i, as_held(silu * up, (const T*)0));
                 }
               });
#pragma omp barrier
    product<T>(at.gated, at.gated_stride, s.rows, l.down, AddTo<T>{l.down, hidden, l.width});
#ifdef KVRING_AMX
    _tile_release();
#endif
  }
}

template <class T, class To>
void run_linear(const T* x, int64_t rows, const Packed& p, To* to, operand<T>* scratch,
                int64_t threads) {
  const int64_t stride = p.inputs + GAP;
#pragma omp parallel num_threads((int)threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < p.inputs; i++)
        narrow(scratch + r * stride + i, wide(x[r * p.inputs + i]));
    product<T>(scratch, stride, rows, p, [&](int64_t row, int64_t block, const float* sums) {
      const int64_t count = std::min(BLOCK, p.outputs - block * BLOCK);
      float made[BLOCK];
      for (int64_t i = 0; i < BLOCK; i += VL) store(made + i, biased(p, block * BLOCK, sums, i));
      To* out = to + row * p.outputs + block * BLOCK;
      for (int64_t i = 0; i < count; i++) narrow(out + i, made[i]);
    });
#ifdef KVRING_AMX
    _tile_release();
#endif
  }
}

// weight: [outputs, inputs]. paired: its first half (gates) and second half (ups) alternate by 16.
template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, bool paired, T* to) {
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks_of(outputs); block++) {
    std::memset((void*)(to + block * BLOCK * inputs), 0, BLOCK * inputs * sizeof(T));
    for (int64_t o = block * BLOCK; o < std::min(outputs, (block + 1) * BLOCK); o++) {
      const int64_t half = BLOCK / 2, within = o % BLOCK;
      const int64_t from = !paired         ? o
                           : within < half ? block * half + within
                                           : outputs / 2 + block * half + within - half;
      for (int64_t i = 0; i < inputs; i++)
        to[place_of<T>(o, i, inputs)] = weight[from * inputs + i];
    }
  }
}

}  // namespace

#define KVRING_EXPORT __attribute__((visibility("default")))

extern "C" {

// 1: with AMX; 0: without; -1: made with AMX, but the system does not allow it.
KVRING_EXPORT int kvring_setup() {
#ifdef KVRING_AMX
  const long request = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tiles) == 0 ? 1 : -1;
#else
  return 0;
#endif
}

KVRING_EXPORT int kvring_vector() { return VL; }

KVRING_EXPORT int64_t kvring_scratch_bytes(const Layer* layer, int64_t rows, int item) {
  return item == 4 ? Scratch<float>(*layer, rows, nullptr).bytes
                   : Scratch<bf16>(*layer, rows, nullptr).bytes;
}

KVRING_EXPORT int64_t kvring_packed_items(int64_t outputs, int64_t inputs) {
  return blocks_of(outputs) * BLOCK * inputs;
}

KVRING_EXPORT void kvring_pack(const void* weight, int64_t outputs, int64_t inputs, int paired,
                               int item, void* to) {
  if (item == 4)
    pack((const float*)weight, outputs, inputs, paired, (float*)to);
  else
    pack((const bf16*)weight, outputs, inputs, paired, (bf16*)to);
}

// numbers: [outputs, inputs]; of 4 bits from 0 to 15. See products.h.
KVRING_EXPORT void kvring_pack_small(const int8_t* numbers, int64_t outputs, int64_t inputs,
                                     int bits, uint8_t* to) {
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks_of(outputs); block++) {
    uint8_t* at = to + block * BLOCK * inputs * bits / 8;
    for (int64_t i = 0; i < inputs; i += 2)
      for (int64_t o = block * BLOCK; o < (block + 1) * BLOCK; o++) {
        const int8_t* pair = numbers + o * inputs + i;
        const uint8_t low = o < outputs ? (uint8_t)pair[0] : 0,
                      high = o < outputs ? (uint8_t)pair[1] : 0;
        if (bits == 8) {
          *at++ = low;
          *at++ = high;
        } else {
          *at++ = (uint8_t)(low | high << 4);
        }
      }
  }
}

KVRING_EXPORT void kvring_layer(const Layer* layer, const Step* step, int item) {
  if (item == 4)
    run_layer<float>(*layer, *step);
  else
    run_layer<bf16>(*layer, *step);
}

KVRING_EXPORT int64_t kvring_linear_scratch_bytes(int64_t inputs, int64_t rows) {
  return rows * (inputs + GAP) * (int64_t)sizeof(float);
}

// to: [rows, outputs], of the rows' type or float.
KVRING_EXPORT void kvring_linear(const void* x, int64_t rows, const Packed* packed, int item,
                                 void* to, int wide_to, void* scratch, int64_t threads) {
  if (item == 4)
    run_linear((const float*)x, rows, *packed, (float*)to, (operand<float>*)scratch, threads);
  else if (wide_to)
    run_linear((const bf16*)x, rows, *packed, (float*)to, (operand<bf16>*)scratch, threads);
  else
    run_linear((const bf16*)x, rows, *packed, (bf16*)to, (operand<bf16>*)scratch, threads);
}

// query, to: rows of [heads, size] with the given strides (of a head, of a row), in numbers.
KVRING_EXPORT void kvring_attention(const Heads* heads, const Part* part, const void* query,
                                    int64_t head_stride, int64_t row_stride, const void* keys,
                                    const void* values, void* to, int item, int64_t threads) {
  const int64_t stride = heads->heads * heads->size;
#pragma omp parallel num_threads((int)threads)
  {
    if (item == 4)
      attend_all(*heads, part, 1, (const float*)query, head_stride, row_stride, keys, values,
                 (float*)to, stride);
    else
      attend_all(*heads, part, 1, (const bf16*)query, head_stride, row_stride, keys, values,
                 (bf16*)to, stride);
#ifdef KVRING_AMX
    _tile_release();
#endif
  }
}
}
