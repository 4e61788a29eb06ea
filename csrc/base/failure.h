// How a communicator failed: what the rank that found it tells the others, and the error that each rank makes of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "base/error.h"

namespace axo {

enum class FailureKind : std::uint32_t { none, peer_lost, timeout, mismatch, aborted };

struct Failure {
  FailureKind kind = FailureKind::none;
  int peer = -1;     // the rank that was lost, or whose operation timed out; -1: none in particular
  std::string text;  // of a lost rank "died" or "left"

  // Whether the text speaks of `peer`: it was lost, or its time was over.
  bool names_peer() const { return peer >= 0 && (kind == FailureKind::peer_lost || kind == FailureKind::timeout); }
  std::string words() const;  // "rank 2 died"
};

// What `rank` of a communicator of `size` ranks has told: it came from another process, in at most `most` bytes of
// text.
Failure told_by(int rank, int size, FailureKind kind, int peer, const char* text, std::size_t most);
// The failure that an error of the core tells of, with all of its text.
Failure failure_of(const std::exception_ptr& error);

// `where` ("all_reduce(...) #3 on 'x' (rank 0 of 2): ") begins the text, `waited` ("; waited 0.5 s") ends it; `who`
// ("rank 1 (process 4711)") is the rank that the failure names, "" where that is none or the one that speaks.
std::exception_ptr error_of(const Failure& failure, const std::string& where, const std::string& who,
                            const std::string& waited);

}  // namespace axo
