// Errors of failures; see base/failure.h.
#include "base/failure.h"

#include <cstring>

namespace axo {

std::string Failure::words() const { return (names_peer() ? "rank " + std::to_string(peer) + " " : "") + text; }

Failure told_by(int rank, int size, FailureKind kind, int peer, const char* text, std::size_t most) {
  if (kind > FailureKind::none && kind <= FailureKind::aborted && peer >= -1 && peer < size) {
    return {kind, peer, std::string(text, ::strnlen(text, most))};
  }
  return {FailureKind::aborted, -1, "rank " + std::to_string(rank) + " aborted without a valid reason"};
}

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    return {FailureKind::peer_lost, e.peer(), e.what()};
  } catch (const Timeout& e) {
    return {FailureKind::timeout, -1, e.what()};
  } catch (const Mismatch& e) {
    return {FailureKind::mismatch, -1, e.what()};
  } catch (const std::exception& e) {
    return {FailureKind::aborted, -1, e.what()};
  } catch (...) {
    return {FailureKind::aborted, -1, "unknown"};
  }
}

std::exception_ptr error_of(const Failure& failure, const std::string& where, const std::string& who,
                            const std::string& waited) {
  const std::string text = (who.empty() ? "" : who + " ") + failure.text;
  switch (failure.kind) {
    case FailureKind::peer_lost:
      return std::make_exception_ptr(PeerLost(where + text + waited, failure.peer));
    case FailureKind::timeout:  // the rank whose time is over says in its text how long that was
      return std::make_exception_ptr(Timeout(where + text + (who.empty() ? "" : waited)));
    case FailureKind::mismatch:
      return std::make_exception_ptr(Mismatch(where + text + waited));
    default:
      return std::make_exception_ptr(Aborted(where + "aborted: " + text + waited));
  }
}

}  // namespace axo
