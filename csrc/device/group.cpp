#include "device/group.h"

#include <utility>
#include <vector>

#include "device/core.h"

namespace axo {

namespace host {
// host/work.cpp keeps the groups of a thread, for both transports.
bool inside_group();
void at_group_end(void (*launch)() noexcept);
}  // namespace host

namespace {

std::vector<DeviceWorkPtr>& recorded() {
  static thread_local std::vector<DeviceWorkPtr> works;
  return works;
}

}  // namespace

bool inside_group() { return host::inside_group(); }

bool record_in_group(const std::shared_ptr<DeviceWork>& work) {
  if (!inside_group()) return false;
  host::at_group_end(&launch_recorded_group);
  recorded().push_back(work);
  return true;
}

void launch_recorded_group() noexcept {
  std::vector<DeviceWorkPtr> works = std::exchange(recorded(), {});
  while (!works.empty()) {
    DeviceContext& context = works.front()->core().context();
    std::vector<DeviceWorkPtr> now, later;
    for (auto& work : works) (&work->core().context() == &context ? now : later).push_back(std::move(work));
    try {
      context.queue().issue(now);
    } catch (...) {  // every work has ended with it
    }
    works = std::move(later);
  }
}

}  // namespace axo
