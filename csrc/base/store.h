// Store: where the ranks of GPUs meet before they have a communicator, and compare operations. A key-value map that all
// of them reach.
//
// Implemented over c10d::Store for processes (torch/bindings.cpp) and over a mutex and a map for ranks as threads
// (tests). What comes out of a store is outside input: check it before use.
#pragma once

#include <string>

#include "base/work.h"

namespace axo {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Whether the key exists, without waiting.
  virtual bool has(const std::string& key) = 0;
  // Blocks until the key exists; throws Timeout.
  virtual std::string get(const std::string& key, Milliseconds timeout) = 0;
};

}  // namespace axo
