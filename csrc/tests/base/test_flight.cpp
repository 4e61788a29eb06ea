// The flight recorder: what it remembers, and when it writes. Oracle: the operations that the test issued.
#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <sstream>

#include "base/flight_recorder.h"
#include "tests/ranks.h"

using namespace axo;
using ranks::Comm;

namespace {

std::string temporary_directory() {
  char name[] = "/tmp/axo-flight-XXXXXX";
  CHECK(::mkdtemp(name) != nullptr);
  return name;
}

std::string read_and_remove(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  ::unlink(path.c_str());
  return text.str();
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

PROCESS_TEST(flight_file_on_failure_and_on_signal) {
  const std::string directory = temporary_directory();
  ranks::TableStore store;
  ranks::all_well(ranks::processes(2, [&](int r) {
    set_flight_directory(directory, SIGUSR1);
    const std::string path = directory + "/axo-flight-" + std::to_string(::getpid()) + ".jsonl";
    Comm c = ranks::connect(store, r, 2);
    std::vector<float> x(10);
    for (int i = 0; i < 300; ++i) {
      c->all_reduce(x.data(), x.data(), 10, DType::float32, ReduceOp::max, ranks::blocking());
    }
    ::raise(SIGUSR1);
    struct stat info{};
    for (int i = 0; i < 1000 && ::stat(path.c_str(), &info) != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::string text = read_and_remove(path);
    CHECK_EQ(count(text, "\n"), 256);
    CHECK_EQ(count(text, "\"op\": \"all_reduce\""), 256);
    CHECK_EQ(count(text, "\"state\": \"done\""), 256);
    CHECK_EQ(
        count(text, "\"sequence\": 300, \"dtype\": \"float32\", \"count\": 10, \"reduce\": \"max\", \"root\": null"),
        1);
    CHECK_EQ(count(text, "\"failure\": null"), 256);
    c->barrier(ranks::blocking());
    if (r == 1) {
      c->barrier({});
      CHECK_THROWS(Mismatch, "", c->barrier(ranks::blocking()));
    } else {
      c->barrier({});
      CHECK_THROWS(Mismatch, "", c->broadcast(x.data(), 10, DType::float32, 1, ranks::blocking()));
    }
    text = read_and_remove(path);
    CHECK_EQ(count(text, "\"state\": \"failed\""), 1);
    CHECK(count(text, "rank 0: broadcast(float32[10], root 1); rank 1: barrier") > 200);
  }));
  CHECK_EQ(::rmdir(directory.c_str()), 0);
}

// Several communicators fail at once, each on a thread of its own: every write gives a whole file.
TEST(flight_files_written_at_the_same_time) {
  const std::string directory = temporary_directory();
  ranks::with_threads(2, [&](Comm c) {
    for (int i = 0; i < 50; ++i) c->barrier(ranks::blocking());
    if (c->rank() == 0) {
      set_flight_directory(directory, 0);
      ranks::threads(4, [](int) {
        for (int i = 0; i < 100; ++i) CHECK(!write_flight_file().empty());
      });
      const std::string path = write_flight_file();
      set_flight_directory("", 0);
      const std::string text = read_and_remove(path);
      CHECK(count(text, "\n") >= 102);
      CHECK_EQ(count(text, "\n"), count(text, "\"failure\": null}\n"));
    }
    c->barrier(ranks::blocking());
  });
  CHECK_EQ(::rmdir(directory.c_str()), 0);
}

TEST(flight_lines_of_pending_operations) {
  ranks::with_threads(2, [](Comm c) {
    c->barrier(ranks::blocking());
    if (c->rank() == 0) {
      std::vector<char> x(3);
      auto a = c->recv(x.data(), 3, DType::uint8, 1, 4, {});
      auto b = c->barrier({});
      auto d = c->barrier({});
      const std::string text = flight_lines();
      CHECK_EQ(count(text,
                     "\"op\": \"recv\", \"sequence\": 0, \"dtype\": \"uint8\", \"count\": 3, \"reduce\": null, "
                     "\"root\": 1, \"tag\": 4, \"state\": \"running\""),
               1);
      CHECK_EQ(count(text, "\"state\": \"queued\""), 1);
      c->send(x.data(), 3, DType::uint8, 1, 0, ranks::blocking());
      a->wait();
      b->wait();
      d->wait();
    } else {
      std::vector<char> x(3);
      c->recv(x.data(), 3, DType::uint8, 0, 0, ranks::blocking());
      c->send(x.data(), 3, DType::uint8, 0, 4, ranks::blocking());
      c->barrier(ranks::blocking());
      c->barrier(ranks::blocking());
    }
  });
}
