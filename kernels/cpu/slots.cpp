// Moves the K and V of slots: bytes only, so that any type of elements passes unchanged.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t BYTES_PER_THREAD = 1 << 18;  // below, waking a thread costs more than it brings

void copy_heads(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t heads, int64_t head_bytes) {
  if (to_stride == head_bytes && from_stride == head_bytes) {
    std::memcpy(to, from, heads * head_bytes);
    return;
  }
  for (int64_t head = 0; head < heads; ++head) std::memcpy(to + head * to_stride, from + head * from_stride, head_bytes);
}

void copy_token(const CopyCall& call, int64_t layer, int64_t token) {
  const KvPlace& place = call.layers[layer];
  const int64_t row = call.heads * call.head_bytes;
  char* staged = call.staging + (layer * call.tokens + token) * 2 * row;
  char* slot = slot_address(place, call.slots[token]);
  for (int64_t offset : {place.key_offset, place.value_offset}) {
    char* kept = slot + offset;
    if (call.to_slots) copy_heads(kept, place.head_stride, staged, call.head_bytes, call.heads, call.head_bytes);
    else copy_heads(staged, call.head_bytes, kept, place.head_stride, call.heads, call.head_bytes);
    staged += row;
  }
}

}  // namespace

extern "C" void meshift_copy(const CopyCall* call) {
  const int64_t bytes = call->layer_count * call->tokens * 2 * call->heads * call->head_bytes;
  const int threads = (int)std::max<int64_t>(1, std::min(call->threads, bytes / BYTES_PER_THREAD));
  const int64_t items = call->layer_count * call->tokens;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < items; ++i) copy_token(*call, i / call->tokens, i % call->tokens);
}

extern "C" void meshift_store(const StoreCall* call) {
  const KvPlace& place = call->kv;
  for (int64_t token = 0; token < call->tokens; ++token) {
    char* slot = slot_address(place, call->slots[token]);
    copy_heads(slot + place.key_offset, place.head_stride, call->key + token * call->key_stride, call->head_bytes,
               call->heads, call->head_bytes);
    copy_heads(slot + place.value_offset, place.head_stride, call->value + token * call->value_stride, call->head_bytes,
               call->heads, call->head_bytes);
  }
}
