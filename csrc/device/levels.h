// Composed collectives on a device (base/composition.h): the communicators that they go through, and the library's
// calls.
//
// The steps of a composed operation are launched one behind the other on the stream of the operation, so that its
// order, its work, its deadline and graphs that capture it are those of any other.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/composition.h"
#include "device/library_call.h"

namespace axo {

// Beside a communicator whose ranks are hosts of equally many neighbours. A failure of one of the three is all of
// them's.
struct Levels {
  Composition composition;
  std::shared_ptr<DeviceCore> inside, between;
  std::map<Kind, std::size_t> least;  // bytes of the whole message from which an operation is composed

  bool take(const Operation& operation) const;
};

// What one operation asks of the library: a round, or where it is composed one for each step.
class LibraryCalls {
 public:
  // Throws as LibraryCall does. `request` must live as long as this.
  LibraryCalls(DeviceCore& core, const Request& request, bool may_be_composed);

  std::size_t rounds() const { return levels_ ? 3 : 1; }
  // Round by round, as LibraryCall's; beyond rounds() nothing is called.
  void before(std::size_t round, GpuStream stream);
  int call(std::size_t round, GpuStream stream);
  void after(std::size_t round, GpuStream stream);
  bool several(std::size_t round);
  DeviceCore& core(std::size_t round) const;  // whose communicator the round is of

 private:
  std::size_t count(std::size_t round) const;  // calls of a round
  LibraryCall& at(std::size_t round, std::size_t i);

  DeviceCore& core_;
  const Request& r_;
  LibraryCall whole_;  // refuses what cannot be, also where it is composed
  const Levels* levels_ = nullptr;
  std::vector<Composition::Step> steps_;
  std::vector<std::vector<LibraryCall>> composed_;  // by round
  void* scratch_ = nullptr;
};

}  // namespace axo
