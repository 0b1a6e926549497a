// The arithmetic of attention, compiled once for each instruction set (LANES and VARIANT come from the command line).
// No header with inline functions is used here but ours, whose functions are force-inlined or static: the linker would
// otherwise be free to take one variant's copy for all.
#include "attention_body.h"

namespace {

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UintVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

#define INLINE static inline __attribute__((always_inline))

constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of a register tile; 4 rows of them fit the registers
constexpr int ROWS = 4;
constexpr float MINUS_INFINITY = -__builtin_inff();

struct BFloat16 { uint16_t bits; };

INLINE Vec load(const float* from) { Vec v; __builtin_memcpy(&v, from, sizeof v); return v; }
INLINE void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE Vec load(const BFloat16* from) {
  HalfVec half;
  __builtin_memcpy(&half, from, sizeof half);
  return (Vec)(__builtin_convertvector(half, UintVec) << 16);
}
INLINE float widen(float x) { return x; }
INLINE float widen(BFloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(float x, BFloat16* to) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  // To nearest, ties to even; a NaN stays one.
  to->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The last, partial vector of a row; the rest is 0.
template <class T> INLINE Vec load_part(const T* from, int count) {
  float part[LANES] = {};
  for (int i = 0; i < count; ++i) part[i] = widen(from[i]);
  return load(part);
}

INLINE Vec spread(float x) { return x - (Vec){}; }
INLINE float sum_of(Vec v) {
  float part[LANES];
  store(part, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}
INLINE float max_of(Vec v) {
  float part[LANES];
  store(part, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
  return part[0];
}

// exp(x) for x <= 0, relative error about 1e-7; what would be below the smallest normal number is 0.
INLINE Vec exp_of(Vec x) {
  const Vec rounder = spread(12582912.0f);
  const Vec n = (x * 1.44269504f + rounder) - rounder;
  const Vec r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Vec p = spread(1.98756915e-4f);
  p = p * r + 1.39819994e-3f;
  p = p * r + 8.33345186e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666654e-1f;
  p = p * r + 5.00000012e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  const IntVec kept = x > -87.0f;
  return (Vec)((IntVec)(p * (Vec)exponent) & kept);
}
INLINE float exp_of(float x) { return exp_of(spread(x))[0]; }

// c[4][wide] = (or +=) a[4][depth] b[depth][wide]
template <int WIDTH>
INLINE void tile(const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_step, int depth,
                 bool add) {
  Vec sums[ROWS][WIDTH];
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WIDTH; ++w) sums[r][w] = add ? load(c + r * c_step + w * LANES) : (Vec){};
  for (int i = 0; i < depth; ++i) {
    Vec row[WIDTH];
    for (int w = 0; w < WIDTH; ++w) row[w] = load(b + i * b_step + w * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Vec factor = spread(a[r * a_step + i]);
      for (int w = 0; w < WIDTH; ++w) sums[r][w] += factor * row[w];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WIDTH; ++w) store(c + r * c_step + w * LANES, sums[r][w]);
}

// c[rows][columns] = (or +=) a[rows][depth] b[depth][columns]; rows a multiple of 4, columns of LANES
void multiply(const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_step, int rows,
              int columns, int depth, bool add) {
  for (int r = 0; r < rows; r += ROWS) {
    int column = 0;
    for (; column + WIDE * LANES <= columns; column += WIDE * LANES)
      tile<WIDE>(a + r * a_step, a_step, b + column, b_step, c + r * c_step + column, c_step, depth, add);
    for (; column < columns; column += LANES)
      tile<1>(a + r * a_step, a_step, b + column, b_step, c + r * c_step + column, c_step, depth, add);
  }
}

// Addresses of head `head` of tokens [first, first + count), K and V.
INLINE void find_tokens(const AttentionCall& call, int64_t sequence, int64_t head, int64_t first, int count,
                        const char** keys, const char** values) {
  const int32_t* slots = call.slots + call.rows[sequence] * call.slots_stride + first;
  const int64_t at = head * call.kv.head_stride;
  for (int t = 0; t < count; ++t) {
    char* token = slot_address(call.kv, slots[t]) + at;
    keys[t] = token + call.kv.key_offset;
    values[t] = token + call.kv.value_offset;
  }
}

// ---- one query token: rows are the query heads of one KV head; the vectors lie along the head's elements

template <class T, int GROUP>
INLINE void score_keys(const float* query, int padded, const char* const* keys, int count, int dim, float* scores) {
  const int whole = dim / LANES;
  for (int t = 0; t < count; ++t) {
    const T* key = (const T*)keys[t];
    if (t + 4 < count)
      for (int d = 0; d < dim; d += 64 / (int)sizeof(T)) __builtin_prefetch((const T*)keys[t + 4] + d);
    Vec sums[GROUP] = {};
    for (int v = 0; v < whole; ++v) {
      const Vec k = load(key + v * LANES);
      for (int g = 0; g < GROUP; ++g) sums[g] += load(query + g * padded + v * LANES) * k;
    }
    if (whole * LANES < dim) {
      const Vec k = load_part(key + whole * LANES, dim - whole * LANES);
      for (int g = 0; g < GROUP; ++g) sums[g] += load(query + g * padded + whole * LANES) * k;
    }
    for (int g = 0; g < GROUP; ++g) scores[g * TILE + t] = sum_of(sums[g]);
  }
}

template <class T, int GROUP>
INLINE void add_values(const float* weights, const char* const* values, int count, int dim, int padded, float* sums) {
  const int whole = dim / LANES;
  for (int v = 0; v * LANES < dim; ++v) {
    Vec acc[GROUP];
    for (int g = 0; g < GROUP; ++g) acc[g] = load(sums + g * padded + v * LANES);
    for (int t = 0; t < count; ++t) {
      const T* value = (const T*)values[t] + v * LANES;
      const Vec x = v < whole ? load(value) : load_part(value, dim - v * LANES);
      for (int g = 0; g < GROUP; ++g) acc[g] += weights[g * TILE + t] * x;
    }
    for (int g = 0; g < GROUP; ++g) store(sums + g * padded + v * LANES, acc[g]);
  }
}

// Turns a row of `count` scores (of TILE, the rest ignored) into weights against the running maximum.
INLINE void soften(float* row, int count, int padded, float* sums, float* top, float* total) {
  for (int t = count; t < TILE; ++t) row[t] = MINUS_INFINITY;
  Vec high = load(row);
  for (int t = LANES; t < TILE; t += LANES) {
    const Vec x = load(row + t);
    high = x > high ? x : high;
  }
  const float highest = max_of(high);
  const float now = highest > *top ? highest : *top;
  const float kept = *top == MINUS_INFINITY ? 0.0f : exp_of(*top - now);
  Vec added = {};
  for (int t = 0; t < TILE; t += LANES) {
    const Vec weight = exp_of(load(row + t) - now);
    store(row + t, weight);
    added += weight;
  }
  *total = *total * kept + sum_of(added);
  *top = now;
  if (kept != 1.0f)
    for (int d = 0; d < padded; d += LANES) store(sums + d, load(sums + d) * kept);
}

template <class T, int GROUP>
void attend_group(const AttentionCall& call, const DecodePart& part, const float* query, float* sums, float* tops,
                  float* totals) {
  const int dim = (int)call.head_dim, padded = padded_dim(dim);
  alignas(64) float scores[GROUP * TILE];
  const char *keys[TILE], *values[TILE];
  for (int64_t t0 = part.first; t0 < part.end; t0 += TILE) {
    const int count = (int)(part.end - t0 < TILE ? part.end - t0 : TILE);
    find_tokens(call, part.sequence, part.kv_head, t0, count, keys, values);
    score_keys<T, GROUP>(query, padded, keys, count, dim, scores);
    for (int g = 0; g < GROUP; ++g) soften(scores + g * TILE, count, padded, sums + g * padded, tops + g, totals + g);
    add_values<T, GROUP>(scores, values, count, dim, padded, sums);
  }
}

template <class T>
void take_query(const AttentionCall& call, int64_t token, int64_t head, int padded, float* to) {
  const T* from = (const T*)call.query + token * call.query_stride + head * call.head_dim;
  for (int d = 0; d < padded; ++d) to[d] = d < call.head_dim ? widen(from[d]) * (float)call.scale : 0.0f;
}

template <class T>
void give_out(const AttentionCall& call, int64_t token, int64_t head, const float* sums, float total) {
  T* to = (T*)call.out + token * call.out_stride + head * call.head_dim;
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int d = 0; d < call.head_dim; ++d) narrow(sums[d] * factor, to + d);
}

template <class T> void attend_part(const AttentionCall& call, const DecodePart& part, float* results) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  const int64_t token = call.query_starts[part.sequence];
  float* sums = results;
  float* tops = results + group * padded;
  float* totals = tops + group;
  for (int i = 0; i < group * padded; ++i) sums[i] = 0.0f;
  alignas(64) float query[4 * DIM_MAX];
  for (int g = 0; g < group;) {
    const int size = group - g >= 4 ? 4 : group - g;
    for (int i = 0; i < size; ++i) {
      tops[g + i] = MINUS_INFINITY;
      totals[g + i] = 0.0f;
      take_query<T>(call, token, part.kv_head * group + g + i, padded, query + i * padded);
    }
    switch (size) {
      case 1: attend_group<T, 1>(call, part, query, sums + g * padded, tops + g, totals + g); break;
      case 2: attend_group<T, 2>(call, part, query, sums + g * padded, tops + g, totals + g); break;
      case 3: attend_group<T, 3>(call, part, query, sums + g * padded, tops + g, totals + g); break;
      default: attend_group<T, 4>(call, part, query, sums + g * padded, tops + g, totals + g);
    }
    g += size;
  }
}

// Joins the parts of one query token and KV head, in their order.
template <class T> void join_parts(const AttentionCall& call, const DecodePart& part, const float* results, int parts) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  const int64_t size = result_floats(group, padded), token = call.query_starts[part.sequence];
  alignas(64) float sums[DIM_MAX];
  for (int g = 0; g < group; ++g) {
    float top = MINUS_INFINITY, total = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float its = results[p * size + group * padded + g];
      top = its > top ? its : top;
    }
    for (int d = 0; d < padded; ++d) sums[d] = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float* its = results + p * size;
      const float factor = exp_of(its[group * padded + g] - top);
      total += its[group * padded + group + g] * factor;
      for (int d = 0; d < padded; d += LANES) store(sums + d, load(sums + d) + load(its + g * padded + d) * factor);
    }
    give_out<T>(call, token, part.kv_head * group + g, sums, total);
  }
}

// ---- many query tokens: rows are tokens times query heads of one KV head; the vectors lie along the keys

// keys_t[dim][TILE] and values[TILE][padded] of up to TILE tokens; the rest is 0.
template <class T>
void pack_tile(const char* const* keys, const char* const* values, int count, int dim, int padded, float* keys_t,
               float* packed) {
  const int whole = dim / LANES;
  for (int t0 = 0; t0 < TILE; t0 += LANES) {
    float block[LANES * LANES];
    for (int v = 0; v * LANES < dim; ++v) {
      const int width = v < whole ? LANES : dim - v * LANES;
      for (int t = 0; t < LANES; ++t) {
        const T* key = t0 + t < count ? (const T*)keys[t0 + t] + v * LANES : 0;
        store(block + t * LANES, !key ? (Vec){} : width == LANES ? load(key) : load_part(key, width));
      }
      for (int d = 0; d < width; ++d) {
        float* to = keys_t + (v * LANES + d) * TILE + t0;
        for (int t = 0; t < LANES; ++t) to[t] = block[t * LANES + d];
      }
    }
  }
  for (int t = 0; t < count; ++t) {
    const T* value = (const T*)values[t];
    for (int v = 0; v < whole; ++v) store(packed + t * padded + v * LANES, load(value + v * LANES));
    if (whole * LANES < dim)
      store(packed + t * padded + whole * LANES, load_part(value + whole * LANES, dim - whole * LANES));
  }
}

template <class T> void attend_tile(const AttentionCall& call, const ExtendTile& work, float* scratch) {
  const int dim = (int)call.head_dim, padded = padded_dim(dim), group = (int)(call.query_heads / call.kv_heads);
  const int64_t start = call.query_starts[work.sequence];
  const int64_t before = call.lengths[work.sequence] - (call.query_starts[work.sequence + 1] - start);
  const int rows = work.tokens * group, full_rows = (rows + ROWS - 1) / ROWS * ROWS;
  float* query = scratch;
  float* sums = query + (int64_t)full_rows * padded;
  float* scores = sums + (int64_t)full_rows * padded;
  float* keys_t = scores + (int64_t)full_rows * TILE;
  float* packed = keys_t + (int64_t)dim * TILE;
  float* tops = packed + (int64_t)TILE * padded;
  float* totals = tops + full_rows;
  for (int64_t i = 0; i < (int64_t)full_rows * padded; ++i) query[i] = sums[i] = 0.0f;
  for (int r = 0; r < rows; ++r) {
    take_query<T>(call, start + work.first + r / group, work.kv_head * group + r % group, padded, query + r * padded);
    tops[r] = MINUS_INFINITY;
    totals[r] = 0.0f;
  }
  const int64_t end = before + work.first + work.tokens;
  const char *keys[TILE], *values[TILE];
  for (int64_t t0 = 0; t0 < end; t0 += TILE) {
    const int count = (int)(end - t0 < TILE ? end - t0 : TILE);
    find_tokens(call, work.sequence, work.kv_head, t0, count, keys, values);
    pack_tile<T>(keys, values, count, dim, padded, keys_t, packed);
    multiply(query, padded, keys_t, TILE, scores, TILE, full_rows, TILE, dim, false);
    for (int r = 0; r < full_rows; ++r) {
      const int64_t seen = r < rows ? before + work.first + r / group + 1 - t0 : 0;
      const int visible = (int)(seen < 0 ? 0 : seen < count ? seen : count);
      if (visible) {
        soften(scores + r * TILE, visible, padded, sums + r * padded, tops + r, totals + r);
      } else {
        for (int t = 0; t < TILE; ++t) scores[r * TILE + t] = 0.0f;
      }
    }
    multiply(scores, TILE, packed, padded, sums, padded, full_rows, padded, count, true);
  }
  for (int r = 0; r < rows; ++r)
    give_out<T>(call, start + work.first + r / group, work.kv_head * group + r % group, sums + r * padded, totals[r]);
}

}  // namespace

#define NAME_OF(variant) attention_##variant
#define NAMED(variant) NAME_OF(variant)
extern "C" const AttentionBody NAMED(VARIANT) = {
    {attend_part<float>, attend_part<BFloat16>},
    {join_parts<float>, join_parts<BFloat16>},
    {attend_tile<float>, attend_tile<BFloat16>},
};
