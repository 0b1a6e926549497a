// Divides the work of attention among threads. The result of a query token doesn't depend on the number of threads, nor
// on what else is in the batch.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "attention_body.h"

extern "C" const AttentionBody attention_portable;
#ifdef HAS_X86_VARIANTS
extern "C" const AttentionBody attention_avx2;
extern "C" const AttentionBody attention_avx512;
#endif

namespace {

constexpr int64_t PART_TOKENS = 256;              // of a long sequence, for one thread at a time
constexpr int64_t PARTS_PER_THREAD = 4;           // at least, or threads wait for the last one
constexpr int TILE_ROWS = 96;                     // query tokens times heads that share K and V
constexpr int64_t OPERATIONS_PER_THREAD = 1 << 20;  // below, waking a thread costs more than it brings

const AttentionBody& body_of(int64_t instruction_set) {
#ifdef HAS_X86_VARIANTS
  if (instruction_set == 2) return attention_avx512;
  if (instruction_set == 1) return attention_avx2;
#endif
  return attention_portable;
}

int threads_for(const AttentionCall& call, int64_t operations, size_t items) {
  const int64_t useful = std::max<int64_t>(1, operations / OPERATIONS_PER_THREAD + (operations >= OPERATIONS_PER_THREAD));
  return (int)std::min({call.threads, useful, (int64_t)std::max<size_t>(1, items)});
}

float* scratch_of(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats) memory.resize(floats);
  return memory.data();
}

void decode(const AttentionCall& call, const AttentionBody& body, const std::vector<int64_t>& sequences) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  const int64_t size = result_floats(group, padded), heads = call.kv_heads;
  int64_t operations = 0, spans = 0;
  for (int64_t sequence : sequences) {
    operations += 4 * call.lengths[sequence] * call.query_heads * call.head_dim;
    spans += (call.lengths[sequence] + PART_TOKENS - 1) / PART_TOKENS;
  }
  const int threads = threads_for(call, operations, (size_t)(spans * heads));
  // All heads of a token at once, as they lie in memory; one by one where that leaves threads without work.
  const int64_t heads_at_once = spans < PARTS_PER_THREAD * threads && threads > 1 ? 1 : heads;
  std::vector<DecodePart> parts;
  for (int64_t sequence : sequences)
    for (int64_t head = 0; head < heads; head += heads_at_once)
      for (int64_t first = 0; first < call.lengths[sequence]; first += PART_TOKENS)
        parts.push_back({sequence, head, head + heads_at_once, first, std::min(first + PART_TOKENS, call.lengths[sequence])});
  thread_local std::vector<float> memory;
  const size_t floats = parts.size() * heads_at_once * size;
  if (memory.size() < floats) memory.resize(floats);
  float* results = memory.data();
  // Large pieces first, so that a thread mostly goes on with what it has prefetched; small ones level out in the end.
#pragma omp parallel for schedule(guided) num_threads(threads) if (threads > 1)
  for (size_t i = 0; i < parts.size(); ++i)
    body.attend_part[call.element](call, parts[i], i + 1 < parts.size() ? &parts[i + 1] : nullptr,
                                   results + i * heads_at_once * size, scratch_of(call.query_heads * padded));
  for (size_t i = 0; i < parts.size();) {
    const DecodePart& part = parts[i];
    const size_t count = (size_t)((call.lengths[part.sequence] + PART_TOKENS - 1) / PART_TOKENS);
    for (int64_t head = part.head_first; head < part.head_end; ++head)
      body.join_parts[call.element](call, part.sequence, head,
                                    results + (i * heads_at_once + head - part.head_first) * size, (int)count,
                                    heads_at_once * size);
    i += count;
  }
}

void extend(const AttentionCall& call, const AttentionBody& body, const std::vector<int64_t>& sequences) {
  const int group = (int)(call.query_heads / call.kv_heads), padded = padded_dim((int)call.head_dim);
  const int tokens_max = std::max(1, TILE_ROWS / group);
  std::vector<ExtendTile> tiles;
  int64_t operations = 0;
  for (int64_t sequence : sequences) {
    const int64_t count = call.query_starts[sequence + 1] - call.query_starts[sequence];
    operations += 4 * count * call.lengths[sequence] * call.query_heads * call.head_dim;
    // The last tokens see most and take longest: they go first.
    for (int64_t last = (count - 1) / tokens_max; last >= 0; --last)
      for (int64_t head = 0; head < call.kv_heads; ++head)
        tiles.push_back({sequence, head, last * tokens_max, (int)std::min<int64_t>(tokens_max, count - last * tokens_max)});
  }
  const int64_t rows = (int64_t)(tokens_max * group + 3) / 4 * 4;
  const size_t floats = (size_t)(rows * (2 * padded + TILE + 2) + TILE * (call.head_dim + padded));
  const int threads = threads_for(call, operations, tiles.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (size_t i = 0; i < tiles.size(); ++i) body.attend_tile[call.element](call, tiles[i], scratch_of(floats));
}

}  // namespace

// 0: portable, 1: AVX2, 2: AVX-512; the best that this processor and this build have.
extern "C" int64_t meshift_instruction_set() {
#ifdef HAS_X86_VARIANTS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

extern "C" void meshift_attention(const AttentionCall* call) {
  std::vector<int64_t> single, many;
  for (int64_t i = 0; i < call->sequences; ++i) {
    const int64_t count = call->query_starts[i + 1] - call->query_starts[i];
    if (count == 1) single.push_back(i);
    if (count > 1) many.push_back(i);
  }
  const AttentionBody& body = body_of(call->instruction_set);
  if (!single.empty()) decode(*call, body, single);
  if (!many.empty()) extend(*call, body, many);
}
