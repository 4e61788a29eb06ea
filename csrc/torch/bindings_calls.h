// What every binding of a collective is made of: codes into types, and one launch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "base/error.h"
#include "base/types.h"
#include "base/work.h"
#include "torch/held.h"

namespace axo {

namespace py = pybind11;
using Address = std::uintptr_t;

template <class T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline DType dtype_of(int code) {
  AXO_CHECK(code >= 0 && code < kDTypeCount, "dtype code", code, "0 to " + std::to_string(kDTypeCount - 1));
  return static_cast<DType>(code);
}

inline ReduceOp op_of(int code) {
  AXO_CHECK(code >= 0 && code < kReduceOpCount, "op code", code, "0 to " + std::to_string(kReduceOpCount - 1));
  return static_cast<ReduceOp>(code);
}

// What every collective ends with: blocking, timeout in milliseconds (-1: the communicator's own), object to keep
// alive; on devices then the caller's stream, and whether the operation comes after what is on it. `call` runs without
// the GIL. A blocking call has nothing left to wait for, so it returns None.
template <class Call>
WorkPtr launch(bool blocking, std::int64_t timeout_ms, const py::object& keep, const Call& call, Address stream = 0,
               bool after_caller = true) {
  release_now();
  CallOptions options;
  options.blocking = blocking;
  options.timeout = Milliseconds(timeout_ms);
  options.stream = pointer(stream);
  options.after_caller = after_caller;
  if (!blocking) options.keep_alive = by_program(held(keep));
  py::gil_scoped_release release;
  WorkPtr work = call(options);
  return blocking ? nullptr : work;
}

// How Python passes a parameter: addresses and codes are integers, counts are lists.
template <class T>
const T& from_python(const T& value) {
  return value;
}
template <class T, std::enable_if_t<std::is_pointer_v<T>, int> = 0>
T from_python(Address address) {
  return pointer(address);
}
template <class T, std::enable_if_t<std::is_same_v<T, DType>, int> = 0>
T from_python(int code) {
  return dtype_of(code);
}
template <class T, std::enable_if_t<std::is_same_v<T, ReduceOp>, int> = 0>
T from_python(int code) {
  return op_of(code);
}
template <class T>
using Python = std::conditional_t<std::is_pointer_v<T>, Address, std::conditional_t<std::is_enum_v<T>, int, T>>;

// Binds a collective: its own parameters without CallOptions, then blocking, timeout and keep, as launch() has them.
// Stream: what a call takes beyond those of the host.
template <class... Stream, class C, class... Parameters, class Class>
void bind_collective(Class& bound, const char* name, WorkPtr (C::*method)(Parameters...)) {
  using All = std::tuple<std::decay_t<Parameters>...>;
  const auto bind = [&]<std::size_t... I>(std::index_sequence<I...>) {
    bound.def(name, [method](C& c, const Python<std::tuple_element_t<I, All>>&... arguments, bool blocking,
                             std::int64_t timeout_ms, const py::object& keep, Stream... stream) {
      const auto call = [&](const CallOptions& options) {
        return (c.*method)(from_python<std::tuple_element_t<I, All>>(arguments)..., options);
      };
      return launch(blocking, timeout_ms, keep, call, stream...);
    });
  };
  bind(std::make_index_sequence<sizeof...(Parameters) - 1>());
}

template <class... Stream, class Class>
void bind_collectives(Class& bound) {
  using C = Communicator;
  bind_collective<Stream...>(bound, "all_reduce", &C::all_reduce);
  bind_collective<Stream...>(bound, "all_gather", &C::all_gather);
  bind_collective<Stream...>(bound, "reduce_scatter", &C::reduce_scatter);
  bind_collective<Stream...>(bound, "broadcast", &C::broadcast);
  bind_collective<Stream...>(bound, "reduce", &C::reduce);
  bind_collective<Stream...>(bound, "gather", &C::gather);
  bind_collective<Stream...>(bound, "scatter", &C::scatter);
  bind_collective<Stream...>(bound, "all_to_all", &C::all_to_all);
  bind_collective<Stream...>(bound, "all_to_all_v", &C::all_to_all_v);
  bind_collective<Stream...>(bound, "send", &C::send);
  bind_collective<Stream...>(bound, "recv", &C::recv);
  bind_collective<Stream...>(bound, "barrier", &C::barrier);
}

}  // namespace axo
