// copy() and stream() against memcpy: any alignment of both ends, sizes around lines and pages, nothing outside.
#include <cstring>
#include <vector>

#include "memory/copy.h"
#include "tests/check.h"

TEST(copies_of_any_alignment) {
  using Copy = void (*)(void*, const void*, std::size_t);
  std::vector<unsigned char> from(40000), to, want;
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31 + i / 251);
  for (Copy copy : {Copy(axo::copy), Copy(axo::stream)}) {
    for (std::size_t size : {0, 1, 63, 64, 65, 127, 4095, 4096, 4097, 8192, 12345, 32768}) {
      for (std::size_t a : {0, 1, 16, 63}) {
        for (std::size_t b : {0, 1, 48, 64}) {
          to.assign(36000, 0xee);
          want = to;
          std::memcpy(want.data() + b, from.data() + a, size);
          copy(to.data() + b, from.data() + a, size);
          CHECK(to == want);
        }
      }
    }
    want = from;
    copy(from.data(), from.data(), from.size());
    CHECK(from == want);
  }
}
