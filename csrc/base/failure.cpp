// Errors of failures; see base/failure.h.
#include "base/failure.h"

namespace axo {

std::string Failure::words() const { return (names_peer() ? "rank " + std::to_string(peer) + " " : "") + text; }

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
