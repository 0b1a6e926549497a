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

// When bytes may leave, of all that share it.
struct Pace {
  int64_t free_at_ns;          // monotonic; changed by several threads
  int64_t burst_ns;            // of unused time that may be made up for
  double ns_per_byte;
};

// How many bytes of `size` are counted into `crc`; the rest, fewer than sixteen, is the caller's. 0: none, on this
// processor.
extern "C" int64_t meshift_crc32(const void* data, int64_t size, uint32_t* crc);

// How many ns from now `size` more bytes may leave.
extern "C" int64_t meshift_reserve(Pace* pace, int64_t size);

// 0, or an errno: ETIMEDOUT where the peer takes nothing for `stall_ns`. `pace` may be null.
extern "C" int64_t meshift_send(int64_t fd, const char* data, int64_t size, Pace* pace, int64_t chunk, int64_t stall_ns);

// 0 when all has come, an errno as above, or -1 at the end of the stream. The first `counted` bytes are in `crc`.
extern "C" int64_t meshift_receive(int64_t fd, char* data, int64_t size, int64_t stall_ns, int64_t* counted,
                                   uint32_t* crc);

// Forced inline: a shared copy could be the one of an instruction set that the processor lacks.
static inline __attribute__((always_inline)) char* slot_address(const KvPlace& place, int64_t slot) {
  if (slot < place.page_tokens) return (char*)place.pages[0] + slot * place.token_stride;
  const int64_t page = slot / place.page_tokens;
  return (char*)place.pages[page] + (slot - page * place.page_tokens) * place.token_stride;
}
