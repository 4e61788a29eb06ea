// The recording of groups; see base/group.h.
#include "base/group.h"

#include <algorithm>
#include <utility>

namespace axo {
namespace {

// What this thread has recorded since its outermost group_start, by launcher, in the order of their first works.
struct Group {
  int depth = 0;
  std::vector<std::pair<std::shared_ptr<GroupLauncher>, std::vector<WorkStatePtr>>> recorded;
};

Group& group() {
  static thread_local Group current;
  return current;
}

}  // namespace

bool inside_group() { return group().depth > 0; }

bool record_in_group(const std::shared_ptr<GroupLauncher>& launcher, const WorkStatePtr& work) {
  if (!inside_group()) return false;
  auto& recorded = group().recorded;
  auto at = std::find_if(recorded.begin(), recorded.end(), [&](const auto& r) { return r.first == launcher; });
  if (at == recorded.end()) at = recorded.emplace(at, launcher, std::vector<WorkStatePtr>{});
  at->second.push_back(work);
  return true;
}

void group_start() { ++group().depth; }

void group_end() {
  if (group().depth == 0) throw Error("group_end: there is no group_start before it on this thread");
  if (--group().depth > 0) return;
  const auto recorded = std::exchange(group().recorded, {});
  for (const auto& [launcher, works] : recorded) launcher->launch(works);
}

}  // namespace axo
