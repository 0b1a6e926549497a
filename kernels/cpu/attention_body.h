// Between the division of the work (attention.cpp) and the arithmetic (attention_body.cpp).
#pragma once
#include "kernels.h"

constexpr int TILE = 64;       // keys taken at once
constexpr int DIM_MAX = 512;   // elements of a head
constexpr int LANES_MAX = 16;  // of the widest instruction set; rows are padded alike for all

struct DecodePart {            // tokens [first, end) of a sequence whose query is one token; KV heads [first, end)
  int64_t sequence, head_first, head_end, first, end;
};
struct ExtendTile {            // query tokens [first, first + tokens) of a sequence
  int64_t sequence, kv_head, first;
  int tokens;
};

static inline int padded_dim(int dim) { return (dim + LANES_MAX - 1) / LANES_MAX * LANES_MAX; }
// Of a part and KV head: sums [group, padded], highest scores [group], totals [group]; padded to whole vectors.
static inline int64_t result_floats(int group, int padded) { return (int64_t)group * padded + (2 * group + 15) / 16 * 16; }

struct AttentionBody {         // indexed by Element
  // `next` is what probably comes after it, or null.
  void (*attend_part[2])(const AttentionCall&, const DecodePart&, const DecodePart* next, float* results, float* query);
  void (*join_parts[2])(const AttentionCall&, int64_t sequence, int64_t head, const float* results, int parts, int64_t size);
  void (*attend_tile[2])(const AttentionCall&, const ExtendTile&, float* scratch);
};
