// Runs the tests, each within a deadline; exit status 1 when any fails or none ran, 3 at the first that is late, whose
// ranks are killed. Tests that fork are not run under ThreadSanitizer, and are counted.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "tests/check.h"

#if defined(__SANITIZE_THREAD__)
// std::exception_ptr counts its references inside libstdc++, which is not instrumented: ThreadSanitizer does not see
// that who deletes an exception comes after who read it.
extern "C" const char* __tsan_default_suppressions() { return "race:std::__exception_ptr::__dest_thunk\n"; }
#endif

namespace {

const char* g_running = "";

void on_alarm(int) {
  const char text[] = "\nTIMEOUT in ";
  (void)!::write(2, text, sizeof(text) - 1);
  (void)!::write(2, g_running, std::strlen(g_running));
  (void)!::write(2, "\n", 1);
  for (int i = 0; i < check::children().count; ++i) ::kill(check::children().pids[i], SIGKILL);
  ::_exit(3);
}

// Whether a test has all words of the command line in its name, and none of those after a minus.
bool is_chosen(const char* name, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const bool without = argv[i][0] == '-';
    if ((std::strstr(name, argv[i] + without) != nullptr) == without) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const char* limit = std::getenv("AXO_TEST_SECONDS");
  ::signal(SIGALRM, on_alarm);
  int ran = 0, left_out = 0;
  std::vector<std::string> failures;
  for (const auto& test : check::tests()) {
    if (!is_chosen(test.name, argc, argv)) continue;
    if (check::kThreadSanitizer && test.forks) {
      ++left_out;
      continue;
    }
    ++ran;
    g_running = test.name;
    ::alarm(limit ? static_cast<unsigned>(std::atoi(limit)) : 120);
    const auto start = std::chrono::steady_clock::now();
    const long before = check::checks();
    std::string error;
    try {
      test.run();
    } catch (const std::exception& e) {
      error = e.what();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%-40s %8ld checks %7.2f s  %s\n", test.name, check::checks() - before, seconds,
                error.empty() ? "ok" : ("FAILED " + error).c_str());
    std::fflush(stdout);
    if (!error.empty()) failures.push_back(std::string(test.name) + ": " + error);
  }
  ::alarm(0);
  std::printf("%d tests, %zu failed", ran, failures.size());
  if (left_out > 0) std::printf(", %d that fork not run under ThreadSanitizer", left_out);
  std::printf("\n");
  // Named once more where a reader of a log's last lines looks.
  for (const auto& failure : failures) std::printf("FAILED %s\n", failure.c_str());
  return !failures.empty() || ran == 0 ? 1 : 0;
}
