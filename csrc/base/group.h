// Operations between group_start and group_end (base/communicator.h): recorded by thread, launched by the outermost
// end.
#pragma once

#include <memory>
#include <vector>

#include "base/work_state.h"

namespace axo {

// What issues the recorded works of one communicator, or of all communicators of one device, as one launch.
class GroupLauncher {
 public:
  virtual ~GroupLauncher() = default;
  // `works` in the order of their calls. One that cannot be issued any more ends with its error; the others go ahead.
  virtual void launch(const std::vector<WorkStatePtr>& works) = 0;
};

// Whether this thread is inside a group.
bool inside_group();
// Inside a group of this thread: takes the work and returns true; otherwise false.
bool record_in_group(const std::shared_ptr<GroupLauncher>& launcher, const WorkStatePtr& work);

}  // namespace axo
