// What the kernels are called with. Mirrored, field by field, in library.py.
#pragma once
#include <cstdint>

// Where one layer's K and V of a slot are: token `slot % page_tokens` of page `slot / page_tokens`.
// Pages are independent allocations; strided slots are one page that holds them all. Offsets and strides in bytes.
struct KvPlace {
  const int64_t* pages;  // addresses
  int64_t page_tokens;
  int64_t key_offset;
  int64_t value_offset;
  int64_t token_stride;
  int64_t head_stride;
};

enum Element : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

// Causal attention of each sequence's last tokens over all of its tokens.
struct AttentionCall {
  KvPlace kv;
  int64_t element;
  int64_t sequences;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;
  const void* query;           // [tokens, query_heads, head_dim]; a token's heads are contiguous
  int64_t query_stride;        // elements from token to token
  void* out;                   // the same
  int64_t out_stride;
  const int64_t* query_starts; // [sequences + 1]
  const int64_t* lengths;      // [sequences], tokens including those of the query
  const int32_t* slots;        // [rows, slots_stride]
  int64_t slots_stride;
  const int64_t* rows;         // [sequences]: token t of sequence i lives in slots[rows[i]][t]
  double scale;
  int64_t threads;
  int64_t instruction_set;
};

// Copies tokens between slots of several layers and [layers, tokens, 2, heads, head_bytes].
struct CopyCall {
  const KvPlace* layers;
  int64_t layer_count;
  const int64_t* slots;
  int64_t tokens;
  int64_t heads;
  int64_t head_bytes;
  char* staging;
  int64_t to_slots;            // 0: gather, 1: scatter
  int64_t threads;
};

// Copies K and V of new tokens into one layer's slots.
struct StoreCall {
  KvPlace kv;
  const int64_t* slots;
  int64_t tokens;
  int64_t heads;
  int64_t head_bytes;
  const char* key;             // a token's heads are contiguous
  const char* value;
  int64_t key_stride;          // bytes from token to token
  int64_t value_stride;
};

// Forced inline: a shared copy could be the one of an instruction set that the processor lacks.
static inline __attribute__((always_inline)) char* slot_address(const KvPlace& place, int64_t slot) {
  if (slot < place.page_tokens) return (char*)place.pages[0] + slot * place.token_stride;
  const int64_t page = slot / place.page_tokens;
  return (char*)place.pages[page] + (slot - page * place.page_tokens) * place.token_stride;
}
