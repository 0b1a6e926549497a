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

// Lanes of two vectors, by numbers that count on from the first to the second.
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (IntVec){__VA_ARGS__})
#endif
#if LANES == 16
#define PAIR_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define PAIR_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define HALF_LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HALF_HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif LANES == 8
#define PAIR_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define PAIR_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define HALF_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define HALF_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#else
#define PAIR_LOW 0, 4, 1, 5
#define PAIR_HIGH 2, 6, 3, 7
#define HALF_LOW 0, 1, 4, 5
#define HALF_HIGH 2, 3, 6, 7
#endif

typedef float Quad __attribute__((vector_size(16)));
typedef float QuadAnywhere __attribute__((vector_size(16), aligned(4)));

// The quarters (or halves) of a vector, added up.
INLINE Quad folded(Vec v) {
  Quad parts[LANES / 4];
  __builtin_memcpy(parts, &v, sizeof v);
  Quad sum = parts[0];
  for (int i = 1; i < LANES / 4; ++i) sum += parts[i];
  return sum;
}
// The sums of four vectors.
INLINE Quad sums_of(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = SHUFFLE(a, b, PAIR_LOW) + SHUFFLE(a, b, PAIR_HIGH);
  const Vec cd = SHUFFLE(c, d, PAIR_LOW) + SHUFFLE(c, d, PAIR_HIGH);
  return folded(SHUFFLE(ab, cd, HALF_LOW) + SHUFFLE(ab, cd, HALF_HIGH));
}
INLINE float sum_of(Vec v) {
  const Quad sum = folded(v);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
INLINE float max_of(Vec v) {
  Quad parts[LANES / 4];
  __builtin_memcpy(parts, &v, sizeof v);
  Quad high = parts[0];
  for (int i = 1; i < LANES / 4; ++i) high = parts[i] > high ? parts[i] : high;
  const float even = high[0] > high[2] ? high[0] : high[2], odd = high[1] > high[3] ? high[1] : high[3];
  return even > odd ? even : odd;
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

// Where tokens [first, first + count) of a sequence are. Slots of one page mostly follow one another.
INLINE void find_tokens(const AttentionCall& call, int64_t sequence, int64_t first, int count, const char** tokens) {
  const int32_t* slots = call.slots + call.rows[sequence] * call.slots_stride + first;
  const KvPlace& kv = call.kv;
  const char* page = 0;
  int64_t start = 0;
  for (int t = 0; t < count; ++t) {
    const int64_t slot = slots[t];
    if (!page || slot < start || slot - start >= kv.page_tokens) {
      start = slot < kv.page_tokens ? 0 : slot / kv.page_tokens * kv.page_tokens;
      page = slot_address(kv, start);
    }
    tokens[t] = page + (slot - start) * kv.token_stride;
  }
}

// ---- one query token: rows are the query heads of one KV head; the vectors lie along the head's elements

constexpr int LINE_BYTES = 64;

// Has a head's K and V of a token brought near: they come from all over the memory, which no processor foresees.
INLINE void prefetch(const AttentionCall& call, const char* token, int64_t head, int bytes) {
  const char* at = token + head * call.kv.head_stride;
  for (int b = 0; b < bytes; b += LINE_BYTES) __builtin_prefetch(at + call.kv.key_offset + b, 0, 2);
  for (int b = 0; b < bytes; b += LINE_BYTES) __builtin_prefetch(at + call.kv.value_offset + b, 0, 2);
}

// Scores of tokens [t, t + 4); the next tile's tokens are prefetched meanwhile.
template <class T, int GROUP>
INLINE void score_four(const float* query, int padded, const char* const* keys, int64_t offset, int dim, float* scores) {
  const T* four[4];
  for (int i = 0; i < 4; ++i) four[i] = (const T*)(keys[i] + offset);
  const int whole = dim / LANES;
  Vec sums[GROUP][4] = {};
  for (int v = 0; v < whole; ++v)
    for (int i = 0; i < 4; ++i) {
      const Vec k = load(four[i] + v * LANES);
      for (int g = 0; g < GROUP; ++g) sums[g][i] += load(query + g * padded + v * LANES) * k;
    }
  if (whole * LANES < dim)
    for (int i = 0; i < 4; ++i) {
      const Vec k = load_part(four[i] + whole * LANES, dim - whole * LANES);
      for (int g = 0; g < GROUP; ++g) sums[g][i] += load(query + g * padded + whole * LANES) * k;
    }
  for (int g = 0; g < GROUP; ++g)
    *(QuadAnywhere*)(scores + g * TILE) = sums_of(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
}

// WIDTH vectors of the sums of `count` weighted values.
template <class T, int GROUP, int WIDTH>
INLINE void add_columns(const float* weights, const char* const* values, int64_t offset, int count, int padded,
                        float* sums) {
  Vec acc[GROUP][WIDTH];
  for (int g = 0; g < GROUP; ++g)
    for (int w = 0; w < WIDTH; ++w) acc[g][w] = load(sums + g * padded + w * LANES);
  for (int t = 0; t < count; ++t) {
    const T* value = (const T*)(values[t] + offset);
    Vec x[WIDTH];
    for (int w = 0; w < WIDTH; ++w) x[w] = load(value + w * LANES);
    for (int g = 0; g < GROUP; ++g) {
      const Vec weight = spread(weights[g * TILE + t]);
      for (int w = 0; w < WIDTH; ++w) acc[g][w] += weight * x[w];
    }
  }
  for (int g = 0; g < GROUP; ++g)
    for (int w = 0; w < WIDTH; ++w) store(sums + g * padded + w * LANES, acc[g][w]);
}

template <class T, int GROUP>
INLINE void add_values(const float* weights, const char* const* values, int64_t offset, int count, int dim, int padded,
                       float* sums) {
  int d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
    add_columns<T, GROUP, WIDE>(weights, values, offset + d * (int)sizeof(T), count, padded, sums + d);
  for (; d + LANES <= dim; d += LANES)
    add_columns<T, GROUP, 1>(weights, values, offset + d * (int)sizeof(T), count, padded, sums + d);
  if (d == dim) return;
  Vec acc[GROUP];
  for (int g = 0; g < GROUP; ++g) acc[g] = load(sums + g * padded + d);
  for (int t = 0; t < count; ++t) {
    const Vec x = load_part((const T*)(values[t] + offset) + d, dim - d);
    for (int g = 0; g < GROUP; ++g) acc[g] += weights[g * TILE + t] * x;
  }
  for (int g = 0; g < GROUP; ++g) store(sums + g * padded + d, acc[g]);
}

struct Tile {
  const char* tokens[TILE + 3];  // the last one again behind them, for whoever takes four at once
  int count;
  const char* next[TILE];        // those that come after them
  int next_count;
};

INLINE void take_tile(const AttentionCall& call, const DecodePart& part, int64_t first, Tile* tile) {
  tile->count = (int)(part.end - first < TILE ? part.end - first : TILE);
  find_tokens(call, part.sequence, first, tile->count, tile->tokens);
  for (int t = tile->count; t < tile->count + 3; ++t) tile->tokens[t] = tile->tokens[tile->count - 1];
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

// Up to four query heads of one KV head, over one tile.
template <class T, int GROUP>
void attend_group(const AttentionCall& call, const Tile& tile, int64_t head, const float* query, float* sums, float* tops,
                  float* totals) {
  const int dim = (int)call.head_dim, padded = padded_dim(dim);
  const int64_t key = call.kv.key_offset + head * call.kv.head_stride;
  const int64_t value = call.kv.value_offset + head * call.kv.head_stride;
  alignas(64) float scores[GROUP * TILE];
  for (int t = 0; t < tile.count; t += 4) {
    for (int i = t; i < t + 4 && i < tile.next_count; ++i) prefetch(call, tile.next[i], head, dim * (int)sizeof(T));
    score_four<T, GROUP>(query, padded, tile.tokens + t, key, dim, scores + t);
  }
  for (int g = 0; g < GROUP; ++g) soften(scores + g * TILE, tile.count, padded, sums + g * padded, tops + g, totals + g);
  add_values<T, GROUP>(scores, tile.tokens, value, tile.count, dim, padded, sums);
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

template <class T>
void attend_head(const AttentionCall& call, const Tile& tile, int64_t head, const float* query, float* result) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  float* tops = result + group * padded;
  float* totals = tops + group;
  for (int g = 0; g < group; g += 4) {
    const float* rows = query + (head * group + g) * padded;
    float* sums = result + g * padded;
    switch (group - g) {
      case 1: attend_group<T, 1>(call, tile, head, rows, sums, tops + g, totals + g); break;
      case 2: attend_group<T, 2>(call, tile, head, rows, sums, tops + g, totals + g); break;
      case 3: attend_group<T, 3>(call, tile, head, rows, sums, tops + g, totals + g); break;
      default: attend_group<T, 4>(call, tile, head, rows, sums, tops + g, totals + g);
    }
  }
}

// All heads of a tile in turn, since a token's K and V lie side by side. `query`: room for [query_heads, padded].
template <class T>
void attend_part(const AttentionCall& call, const DecodePart& part, const DecodePart* next, float* results, float* query) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  const int64_t size = result_floats(group, padded);
  for (int64_t head = part.head_first; head < part.head_end; ++head) {
    float* result = results + (head - part.head_first) * size;
    for (int i = 0; i < group * padded; ++i) result[i] = 0.0f;
    for (int g = 0; g < group; ++g) {
      result[group * padded + g] = MINUS_INFINITY;
      result[group * padded + group + g] = 0.0f;
      const int64_t row = head * group + g;
      take_query<T>(call, call.query_starts[part.sequence], row, padded, query + row * padded);
    }
  }
  Tile tile;
  for (int64_t t0 = part.first; t0 < part.end; t0 += TILE) {
    take_tile(call, part, t0, &tile);
    const DecodePart* after = t0 + TILE < part.end ? &part : next;
    const int64_t first = after == &part ? t0 + TILE : after ? after->first : 0;
    tile.next_count = after ? (int)(after->end - first < TILE ? after->end - first : TILE) : 0;
    if (after) find_tokens(call, after->sequence, first, tile.next_count, tile.next);
    for (int64_t head = part.head_first; head < part.head_end; ++head)
      attend_head<T>(call, tile, head, query, results + (head - part.head_first) * size);
  }
}

// Joins the parts of one query token and KV head, in their order; they lie `size` floats apart.
template <class T>
void join_parts(const AttentionCall& call, int64_t sequence, int64_t head, const float* results, int parts, int64_t size) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  const int64_t token = call.query_starts[sequence];
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
    give_out<T>(call, token, head * group + g, sums, total);
  }
}

// ---- many query tokens: rows are tokens times query heads of one KV head; the vectors lie along the keys

// keys_t[dim][TILE] and values[TILE][padded] of up to TILE tokens; the rest is 0.
template <class T>
void pack_tile(const char* const* tokens, int64_t key_offset, int64_t value_offset, int count, int dim, int padded,
               float* keys_t, float* packed) {
  const int whole = dim / LANES;
  for (int t0 = 0; t0 < TILE; t0 += LANES) {
    float block[LANES * LANES];
    for (int v = 0; v * LANES < dim; ++v) {
      const int width = v < whole ? LANES : dim - v * LANES;
      for (int t = 0; t < LANES; ++t) {
        const T* key = t0 + t < count ? (const T*)(tokens[t0 + t] + key_offset) + v * LANES : 0;
        store(block + t * LANES, !key ? (Vec){} : width == LANES ? load(key) : load_part(key, width));
      }
      for (int d = 0; d < width; ++d) {
        float* to = keys_t + (v * LANES + d) * TILE + t0;
        for (int t = 0; t < LANES; ++t) to[t] = block[t * LANES + d];
      }
    }
  }
  for (int t = 0; t < count; ++t) {
    const T* value = (const T*)(tokens[t] + value_offset);
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
  const int64_t at = work.kv_head * call.kv.head_stride;
  const char* tokens[TILE];
  for (int64_t t0 = 0; t0 < end; t0 += TILE) {
    const int count = (int)(end - t0 < TILE ? end - t0 : TILE);
    find_tokens(call, work.sequence, t0, count, tokens);
    pack_tile<T>(tokens, at + call.kv.key_offset, at + call.kv.value_offset, count, dim, padded, keys_t, packed);
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
