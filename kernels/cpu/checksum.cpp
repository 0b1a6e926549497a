// CRC-32 as zlib computes it, by carry-less multiplication: sixteen bytes at a time are folded over what follows them.
//
// A block of bits b, d bits before another, counts for the CRC as b * (x^d mod P) at the place of the other. For the
// bit-reversed CRC the constants are the reversed remainders, shifted by one. P is 0x104C11DB7.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

#define FOLDS __attribute__((target("pclmul,sse4.1")))

// (x^(d+32), x^(d-32)) mod P, reversed, for blocks that lie d bits apart.
FOLDS inline __m128i over_512_bits() { return _mm_set_epi64x(0x1c6e41596, 0x154442bd4); }
FOLDS inline __m128i over_128_bits() { return _mm_set_epi64x(0x0ccaa009e, 0x1751997d0); }

FOLDS inline __m128i load(const unsigned char* at) { return _mm_loadu_si128((const __m128i*)at); }

FOLDS inline __m128i fold(__m128i block, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(block, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(block, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// What is left of 128 bits modulo P (Barrett's reduction).
FOLDS inline uint32_t reduce(__m128i block) {
  const __m128i low_32 = _mm_setr_epi32(-1, 0, -1, 0);
  // 128 bits to 96, to 64.
  __m128i rest = _mm_xor_si128(_mm_srli_si128(block, 8), _mm_clmulepi64_si128(block, over_128_bits(), 0x10));
  const __m128i x_64 = _mm_set_epi64x(0, 0x163cd6124);
  rest = _mm_xor_si128(_mm_srli_si128(rest, 4), _mm_clmulepi64_si128(_mm_and_si128(rest, low_32), x_64, 0x00));
  // Its quotient by P, times P.
  const __m128i divisor = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  __m128i part = _mm_clmulepi64_si128(_mm_and_si128(rest, low_32), divisor, 0x10);
  part = _mm_clmulepi64_si128(_mm_and_si128(part, low_32), divisor, 0x00);
  return (uint32_t)_mm_extract_epi32(_mm_xor_si128(rest, part), 1);
}

FOLDS uint32_t crc32_of(const unsigned char* data, int64_t size, uint32_t crc) {
  __m128i blocks[4];
  for (int i = 0; i < 4; ++i) blocks[i] = load(data + 16 * i);
  blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128((int)crc));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
    for (int i = 0; i < 4; ++i) blocks[i] = fold(blocks[i], over_512_bits(), load(data + 16 * i));
  __m128i all = blocks[0];
  for (int i = 1; i < 4; ++i) all = fold(all, over_128_bits(), blocks[i]);
  for (; size >= 16; data += 16, size -= 16) all = fold(all, over_128_bits(), load(data));
  return reduce(all);
}

}  // namespace

extern "C" int64_t meshift_crc32(const void* data, int64_t size, uint32_t* crc) {
  if (size < 64 || !__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
  const int64_t counted = size - size % 16;
  *crc = ~crc32_of((const unsigned char*)data, counted, ~*crc);
  return counted;
}

#else

extern "C" int64_t meshift_crc32(const void*, int64_t, uint32_t*) { return 0; }

#endif
