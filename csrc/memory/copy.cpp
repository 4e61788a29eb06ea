// memcpy by pages with a prefetch, and non-temporal stores; see memory/copy.h.
#include "memory/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// Sanitizers see neither assembly nor what is written around the caches.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#include <cpuid.h>
#include <emmintrin.h>
#define AXO_X86 1
#endif

namespace axo {
namespace {

#if defined(AXO_X86)
// From here on the string instructions are worth their start.
constexpr std::size_t kLong = 4096;

bool has_fast_strings() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 9 & 1) != 0;  // ERMS
}

const bool kFastStrings = has_fast_strings();
#endif

}  // namespace

void copy(void* to, const void* from, std::size_t bytes) {
  if (to == from) return;
  auto* d = static_cast<char*>(to);
  const auto* s = static_cast<const char*>(from);
#if defined(AXO_X86)
  if (kFastStrings && bytes >= kLong) {
    // Whole lines only: some processors are many times slower where the destination begins inside one.
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(d) % kLine) % kLine;
    std::memcpy(d, s, head);
    d += head;
    s += head;
    bytes -= head;
    asm volatile("rep movsb" : "+D"(d), "+S"(s), "+c"(bytes) : : "memory");
    return;
  }
#endif
  while (bytes > kAheadBytes) {
    prefetch_ahead(s);
    std::memcpy(d, s, kAheadBytes);
    d += kAheadBytes;
    s += kAheadBytes;
    bytes -= kAheadBytes;
  }
  if (bytes != 0) std::memcpy(d, s, bytes);
}

void stream(void* to, const void* from, std::size_t bytes) {
#if defined(AXO_X86)
  if (to == from) return;
  auto* d = static_cast<char*>(to);
  const auto* s = static_cast<const char*>(from);
  const std::size_t head = std::min<std::size_t>((kLine - reinterpret_cast<std::uintptr_t>(d) % kLine) % kLine, bytes);
  if (head != 0) std::memcpy(d, s, head);
  d += head;
  s += head;
  bytes -= head;
  while (bytes >= kLine) {
    const std::size_t page = std::min(bytes / kLine * kLine, kAheadBytes);
    prefetch_ahead(s);
    for (std::size_t i = 0; i < page; i += kLine) {
      const auto* line = reinterpret_cast<const __m128i*>(s + i);
      const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2), e = _mm_loadu_si128(line + 3);
      auto* out = reinterpret_cast<__m128i*>(d + i);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, e);
    }
    d += page;
    s += page;
    bytes -= page;
  }
  if (bytes != 0) std::memcpy(d, s, bytes);
  _mm_sfence();
#else
  copy(to, from, bytes);
#endif
}

}  // namespace axo
