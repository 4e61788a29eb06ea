// Device operations between group_start and group_end: recorded by thread, launched as one by the outermost end.
#pragma once

#include <memory>

namespace axo {

class DeviceWork;

bool inside_group();
// Takes the operation and returns true inside a group of this thread; otherwise false.
bool record_in_group(const std::shared_ptr<DeviceWork>& work);
// What this thread recorded, as one launch for each device. An operation that cannot be launched ends with its error,
// which its Work throws. group_end calls it when the outermost group ends.
void launch_recorded_group() noexcept;

}  // namespace axo
