// The one thread that completes futures, of axo.Work and of torch.distributed, in order: their callbacks may issue
// collectives and take the GIL, which the core's own threads must not. A callback must not wait for another such
// future.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace axo {

class FutureThread {
 public:
  // Runs `job` there, after those that were posted before. The thread starts with the first; a forked child has its
  // own.
  static void post(std::function<void()> job);
  // Whether the caller runs inside a job.
  static bool here();
  // Before the interpreter ends: waits, some seconds at most, for the job that runs; later ones never run.
  static void stop();

 private:
  FutureThread();
  static FutureThread& get();
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false, stopped_ = false;
};

}  // namespace axo
