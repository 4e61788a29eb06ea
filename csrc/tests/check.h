// A test runner in one header: TEST(name) { CHECK(...) }, run by main.cpp. `tests [substring]` runs the tests whose
// name contains the substring.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

struct Test {
  const char* name;
  void (*run)();
  bool forks;  // ThreadSanitizer does not support a child that starts threads, and sees one process only
};

// Seconds that a fuzz test may take: AXO_FUZZ_SECONDS, or a short sample.
inline double fuzz_seconds() {
  const char* text = std::getenv("AXO_FUZZ_SECONDS");
  return text ? std::atof(text) : 1.5;
}

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<long>& checks() {
  static std::atomic<long> count{0};
  return count;
}

// The forked processes that run now: killed when a test is late.
struct Children {
  static constexpr int kMost = 64;
  volatile int count = 0;
  volatile int pids[kMost] = {};
  void add(int pid) {
    if (count == kMost) return;
    pids[count] = pid;
    count = count + 1;
  }
};
inline Children& children() {
  static Children all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)(), bool forks) { tests().push_back({name, run, forks}); }
};

class Failed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void equal(const A& a, const B& b, const char* file, int line, const char* text) {
  ++checks();
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  fail(file, line, out.str());
}

}  // namespace check

#define AXO_TEST(name, forks)                                         \
  static void test_##name();                                          \
  static check::Register register_##name(#name, &test_##name, forks); \
  static void test_##name()

#define TEST(name) AXO_TEST(name, false)
// A test whose ranks are forked processes.
#define PROCESS_TEST(name) AXO_TEST(name, true)

#define CHECK(cond)                                              \
  do {                                                           \
    ++check::checks();                                           \
    if (!(cond)) check::fail(__FILE__, __LINE__, "not: " #cond); \
  } while (0)

#define CHECK_EQ(a, b) check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)

// The statement must throw `Type` whose text contains `part`.
#define CHECK_THROWS(Type, part, ...)                                                                      \
  do {                                                                                                     \
    ++check::checks();                                                                                     \
    bool thrown = false;                                                                                   \
    try {                                                                                                  \
      __VA_ARGS__;                                                                                         \
    } catch (const Type& e) {                                                                              \
      thrown = true;                                                                                       \
      if (std::string(e.what()).find(part) == std::string::npos) {                                         \
        check::fail(__FILE__, __LINE__, std::string(#Type " says: ") + e.what() + "; without: " + (part)); \
      }                                                                                                    \
    } catch (const std::exception& e) {                                                                    \
      check::fail(__FILE__, __LINE__, std::string("expected " #Type ", got: ") + e.what());                \
    }                                                                                                      \
    if (!thrown) check::fail(__FILE__, __LINE__, "expected " #Type ", nothing was thrown");                \
  } while (0)
