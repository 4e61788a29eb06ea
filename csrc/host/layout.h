// What the ranks of one host communicator share: the layout of its segment, a pure function of the number of ranks.
//
//   header | RankState[n] | counts rows [n][kHeaders][n] | stages [n][kDepth] | results [n][kDepth] | channels [n][n]
//
// Collectives work in rounds, numbered over the communicator's life. In round k a rank may put up to slot_bytes into
// its stage k % kDepth, and, where it owns a part of a reduction, up to part_bytes into its result k % kDepth. Four
// counters say how far a rank is; each is written by its rank alone:
//   issued   collectives that it has started; header of collective s is headers[s % kHeaders]
//   posted   rounds whose stage it has filled
//   reduced  rounds whose result it has filled
//   done     rounds in which it will read nothing any more: stage and result k are free again when all have done > k;
//            after a collective of one round the rank writes it together with its next collective
// A rank completes a collective only when it has seen the headers of all, so ranks are at most one collective apart and
// a header is never overwritten while somebody may read it.
//
// A channel carries point-to-point messages from one rank to another: envelopes with small payloads inside, and a ring
// of chunks for the payload of the one message that the receiver has granted. See host/messages.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/failure.h"
#include "base/operation.h"

namespace axo::host {

inline constexpr int kMaxRanks = 256;
inline constexpr int kDepth = 8;
inline constexpr int kHeaders = 4;
inline constexpr std::size_t kAbortText = 1000;
inline constexpr int kEnvelopes = 16;
inline constexpr std::size_t kInline = 448;
inline constexpr int kChunks = 4;
inline constexpr std::size_t kChunkBytes = 64 * 1024;

// What a rank issued as its `sequence`-th collective. All ranks' operations must be equal.
struct alignas(64) CollectiveHeader {
  std::uint64_t sequence;
  Operation operation;
  // Which of the rank's buffers its peers can reach, and where they lie in its heap.
  std::uint32_t shared;
  std::uint64_t in_offset, out_offset;
};
static_assert(sizeof(CollectiveHeader) == 64);
inline constexpr std::uint32_t kSharedIn = 1, kSharedOut = 2, kMapsHeaps = 4;

// Why a rank gave up. Written once by its rank, then published by `state`.
struct alignas(64) AbortRecord {
  std::atomic<std::uint32_t> state;  // 1 when the rest is valid
  FailureKind kind;
  std::int32_t peer;
  std::uint32_t ticket;  // order among the ranks' records
  char text[kAbortText];
};

struct RankState {
  alignas(64) std::atomic<std::uint64_t> issued;
  std::atomic<std::uint64_t> posted;
  std::atomic<std::uint64_t> reduced;
  std::atomic<std::uint64_t> done;
  alignas(64) std::atomic<std::uint32_t> left;  // 1 when the rank has closed the communicator
  CollectiveHeader headers[kHeaders];
  AbortRecord abort;
};

struct SegmentHeader {
  static constexpr std::uint64_t kMagic = 0x31676573'6f7861ull;
  static constexpr std::uint32_t kVersion = 4;
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t ranks;
  std::uint64_t bytes;
  std::uint64_t id;                               // random: tells communicators of one name apart in flight files
  alignas(64) std::atomic<std::uint32_t> aborts;  // number of abort records; the ticket counter
};

struct Envelope {
  std::uint64_t id;
  std::uint64_t bytes;
  std::int32_t tag;
  std::uint32_t dtype;
  std::uint32_t inlined;
  alignas(64) char payload[kInline];
};

struct Channel {
  alignas(64) std::atomic<std::uint64_t> posted;  // envelopes written, by the sender
  std::atomic<std::uint64_t> filled;              // chunks written, by the sender
  alignas(64) std::atomic<std::uint64_t> taken;   // envelopes read, by the receiver
  std::atomic<std::uint64_t> emptied;             // chunks read, by the receiver
  std::atomic<std::uint64_t> grants;              // grants made, by the receiver
  std::uint64_t granted_id;                       // valid for the newest grant
  Envelope envelopes[kEnvelopes];
  alignas(64) char chunks[kChunks][kChunkBytes];
};

class Layout {
 public:
  explicit Layout(int ranks);

  int ranks() const { return n_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t slot_bytes() const { return slot_; }
  // A stage has one part for each peer of its owner.
  std::size_t part_bytes() const { return part_; }
  std::size_t part_at(int owner, int peer) const {
    return static_cast<std::size_t>(peer < owner ? peer : peer - 1) * part_;
  }

  SegmentHeader* header(char* base) const { return reinterpret_cast<SegmentHeader*>(base); }
  RankState* state(char* base, int rank) const { return reinterpret_cast<RankState*>(base + states_) + rank; }
  std::uint64_t* row(char* base, int rank, std::uint64_t sequence) const {
    return reinterpret_cast<std::uint64_t*>(base + rows_) +
           (static_cast<std::size_t>(rank) * kHeaders + sequence % kHeaders) * static_cast<std::size_t>(n_);
  }
  char* stage(char* base, int rank, std::uint64_t round) const {
    return base + stages_ + (static_cast<std::size_t>(rank) * kDepth + round % kDepth) * slot_;
  }
  char* result(char* base, int rank, std::uint64_t round) const {
    return base + results_ + (static_cast<std::size_t>(rank) * kDepth + round % kDepth) * part_;
  }
  Channel* channel(char* base, int from, int to) const {
    return reinterpret_cast<Channel*>(base + channels_) + static_cast<std::size_t>(from) * n_ + to;
  }

 private:
  int n_;
  std::size_t slot_, part_, states_, rows_, stages_, results_, channels_, bytes_;
};

}  // namespace axo::host
