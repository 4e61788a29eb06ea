// The errors of the core, and the check that prints what was wrong, what came and what was expected.
//
//   AXO_CHECK(root < size, "broadcast: root", root, "a rank below " + std::to_string(size));
//   -> "broadcast: root: got 7, expected a rank below 4"
#pragma once

#include <cstddef>
#include <sstream>
#include <stdexcept>
#include <string>

namespace axo {

// A wrong argument or a call that the state forbids. Base of all errors of the core.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The system refused this process memory or a file: a limit of it (ulimit), or there is no more.
class ResourceError : public Error {
 public:
  using Error::Error;
};

// A peer process died or left while an operation needed it.
class PeerLost : public Error {
 public:
  PeerLost(const std::string& message, int peer) : Error(message), peer_(peer) {}
  int peer() const { return peer_; }  // its rank in the communicator

 private:
  int peer_;
};

// An operation did not finish within its timeout; the message names who has arrived and who has not.
class Timeout : public Error {
 public:
  using Error::Error;
};

// Ranks issued operations that do not match (kind, dtype, count, op, root, order).
class Mismatch : public Error {
 public:
  using Error::Error;
};

// The communicator was aborted, by this rank or by another.
class Aborted : public Error {
 public:
  using Error::Error;
};

// The first `bytes` bytes of a text in UTF-8, or fewer: never a part of a character.
inline std::string clipped(const std::string& text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

namespace detail {
template <class Got>
std::string check_message(const char* what, const Got& got, const std::string& expected) {
  std::ostringstream out;
  out << what << ": got " << got << ", expected " << expected;
  return out.str();
}
}  // namespace detail

}  // namespace axo

#define AXO_CHECK(cond, what, got, expected)                                            \
  do {                                                                                  \
    if (!(cond)) throw ::axo::Error(::axo::detail::check_message(what, got, expected)); \
  } while (0)
