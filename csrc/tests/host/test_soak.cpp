// The long proofs. They run only when asked for: AXO_SOAK=N multiplies their length, N = 1 being a short sample.
#include <dirent.h>
#include <malloc.h>

#include <cstdlib>
#include <fstream>

#include "tests/interleave.h"

using namespace axo;
using ranks::Comm;

namespace {

long resident_kib(const char* key) {
  std::ifstream status("/proc/self/status");
  const std::string wanted = key;
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, wanted.size(), wanted) == 0) return std::atol(line.c_str() + wanted.size() + 1);
  }
  return -1;
}

int open_files() {
  int n = 0;
  DIR* dir = ::opendir("/proc/self/fd");
  while (::readdir(dir)) ++n;
  ::closedir(dir);
  return n;
}

}  // namespace

// AXO_SOAK=10 is 200,000 operations: 4 communicators of 4 processes.
PROCESS_TEST(soak_random_operations) {
  const char* text = std::getenv("AXO_SOAK");
  const int rounds = text ? 10 * std::atoi(text) : 1;
  ranks::TableStore store;
  ranks::all_well(ranks::processes(4, [&](int r) {
    ::alarm(0);
    ::mallopt(M_MMAP_THRESHOLD, 64 * 1024);  // buffers go back to the system: what stays is a leak
    Comm c = ranks::connect(store, r, 4, Milliseconds(600000));
    long before = 0;
    int files = 0;
    for (int i = 0; i < rounds; ++i) {
      ranks::interleave(c, static_cast<unsigned>(100 + i), text ? 500 : 100);
      ::malloc_trim(0);
      if (i == rounds / 10) {
        before = resident_kib("RssAnon:");
        files = open_files();
      }
    }
    const long after = resident_kib("RssAnon:");
    const int files_after = open_files();
    std::printf("rank %d: %d operations, resident %ld -> %ld KiB, files %d -> %d\n", r, rounds * (text ? 2000 : 400),
                before, after, files, files_after);
    std::fflush(stdout);
    if (const char* path = std::getenv("AXO_RESULTS"); path && text) {
      std::ofstream(path, std::ios::app) << "{\"test\": \"random operations\", \"rank\": " << r
                                         << ", \"operations\": " << rounds * 2000
                                         << ", \"resident_growth_kib\": " << after - before
                                         << ", \"descriptors_growth\": " << files_after - files << "}\n";
    }
    CHECK(after - before < 1024);
    CHECK_EQ(files_after, files);
    c->shutdown();
  }));
  ++check::checks();
}
