// Random bytes for everything that reads what others write: sockets, store entries, and the shared segment.
//
// Oracle: a call ends well or throws axo::Error; the sanitizers watch the memory. Each target runs for
// AXO_FUZZ_SECONDS (a short sample by default); the seed is printed on failure.
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <random>

#include "host/create.h"
#include "host/rendezvous.h"
#include "tests/ranks.h"

using namespace axo;
using namespace axo::host;
using ranks::Comm;

namespace {

using Random = std::mt19937_64;

void repeat(const char* name, const std::function<void(Random&)>& body) {
  const auto end = Clock::now() + std::chrono::duration<double>(check::fuzz_seconds());
  for (std::uint64_t seed = 1; Clock::now() < end; ++seed) {
    Random random(seed);
    try {
      body(random);
    } catch (const std::exception& e) {
      throw check::Failed(std::string(name) + ", seed " + std::to_string(seed) + ": " + e.what());
    }
    ++check::checks();
  }
}

Fd connect_to(const std::string& name) {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof(address.sun_path) - 1));
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return Fd();
  return fd;
}

// Some bytes, sometimes with descriptors, sometimes starting like a real message.
void send_noise(int socket, Random& random) {
  std::vector<char> bytes(random() % 3 == 0 ? 56 : random() % 700);
  for (auto& b : bytes) b = static_cast<char>(random());
  const std::uint64_t magic = 0x6f6c6c6568'6f7861ull;
  if (random() % 2 && bytes.size() >= 8) std::memcpy(bytes.data(), &magic, 8);
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 3)] = {};
  if (random() % 2) {
    const std::size_t n = 1 + random() % 3;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * n);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * n);
    for (std::size_t i = 0; i < n; ++i) {
      const int fd = static_cast<int>(random() % 3);
      std::memcpy(CMSG_DATA(head) + i * sizeof(int), &fd, sizeof(int));
    }
  }
  ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

TEST(fuzz_strangers_at_the_socket) {
  repeat("strangers", [](Random& random) {
    ranks::TableStore store;
    std::atomic<bool> stop{false};
    const std::uint64_t seed = random();
    std::thread stranger([&] {
      Random own(seed);
      std::string card;
      try {
        card = store.get("world/0", Milliseconds(1000));
      } catch (const Timeout&) {
        return;  // the ranks were faster
      }
      std::istringstream in(card);
      std::string pid, thread, space, name;
      in >> pid >> thread >> space >> name;
      while (!stop) {
        Fd fd = connect_to(name);
        if (!fd) break;
        for (auto n = own() % 3; n > 0; --n) send_noise(fd.get(), own);
      }
    });
    ranks::threads(3, [&](int r) {
      if (r > 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      Comm c = ranks::connect(store, r, 3);
      float x = 1;
      c->all_reduce(&x, &x, 1, DType::float32, ReduceOp::sum, ranks::blocking());
      CHECK_EQ(x, 3.0f);
      c->shutdown();
    });
    stop = true;
    stranger.join();
  });
}

TEST(fuzz_store_entries) {
  repeat("store", [](Random& random) {
    struct Mutating final : Store {
      ranks::TableStore inner;
      Random* random = nullptr;
      std::mutex mutex;
      void set(const std::string& key, const std::string& value) override {
        std::lock_guard<std::mutex> lock(mutex);
        std::string v = value;
        for (auto n = (*random)() % 3; n > 0 && !v.empty(); --n) {
          const std::size_t at = (*random)() % v.size();
          switch ((*random)() % 3) {
            case 0:
              v[at] = static_cast<char>(1 + (*random)() % 255);
              break;
            case 1:
              v.resize(at);
              break;
            default:
              v.insert(at, (*random)() % 100, 'x');
          }
        }
        inner.set(key, v);
      }
      bool has(const std::string& key) override { return inner.has(key); }
      std::string get(const std::string& key, Milliseconds timeout) override { return inner.get(key, timeout); }
    } store;
    store.random = &random;
    ranks::threads(2, [&](int r) {
      try {
        Comm c = ranks::connect(store, r, 2, Milliseconds(60));
        c->shutdown();
      } catch (const Error&) {
      }
    });
  });
}

TEST(fuzz_false_leader) {
  repeat("false leader", [](Random& random) {
    const std::string name = "axo-" + random_hex();
    Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    CHECK_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    CHECK_EQ(::listen(listener.get(), 4), 0);
    Address to{};
    std::memcpy(to.socket, name.data(), name.size());
    const std::uint64_t seed = random();
    std::thread leader([&] {
      Random own(seed);
      Fd peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      for (auto n = own() % 4; n > 0; --n) send_noise(peer.get(), own);
    });
    try {
      Joined joined = join(to, Meeting{"fuzz", 1, 2, deadline_after(Milliseconds(100))}, true, [] {});
      check_segment(joined.segment, 2);
      Process process(joined.pages[0].get(), joined.heaps[0].get());
      check::fail(__FILE__, __LINE__, "noise made a communicator");
    } catch (const Failure&) {
    } catch (const Error&) {
    }
    leader.join();
  });
}

// Rank 0 is real, rank 1 is noise in the segment.
TEST(fuzz_shared_segment) {
  repeat("segment", [](Random& random) {
    Membership m;
    m.member = {"fuzz", 0, 2};
    m.timeout = Milliseconds(20);
    Fd fd;
    m.segment = make_segment(2, &fd);
    m.processes = {ProgressEngine::get().self(), ProgressEngine::get().self()};
    auto segment = m.segment;
    auto core = std::make_shared<HostCore>(std::move(m));
    const Layout layout(2);
    RankState& other = *layout.state(segment->base(), 1);
    Channel& to_me = *layout.channel(segment->base(), 1, 0);
    Channel& from_me = *layout.channel(segment->base(), 0, 1);
    const auto small = [&] { return random() % 5 == 0 ? random() : random() % 40; };
    auto in = allocate_shared(1 << 18), out = allocate_shared(1 << 18);
    for (int step = 0; step < 12; ++step) {
      Request r;
      r.kind = static_cast<Kind>(random() % static_cast<unsigned>(kKindCount));
      r.count = random() % 2 ? random() % 16 : 9000;
      r.dtype = DType::float32;
      r.in = in.get();
      r.out = out.get();
      r.root = static_cast<int>(random() % 2);
      r.send_bytes = r.recv_bytes = {r.count, r.count};
      r.send_offsets = r.recv_offsets = {0, r.count};
      auto work = std::make_shared<HostWork>(core, r, CallOptions{});
      try {
        core->check_usable("fuzz");
      } catch (const Error&) {
        break;
      }
      core->submit(work, true);
      // What a correct peer would write, more or less.
      CollectiveHeader& h = other.headers[work->sequence() % kHeaders];
      h = layout.state(segment->base(), 0)->headers[work->sequence() % kHeaders];
      if (random() % 3 == 0) h.operation.dtype = static_cast<DType>(random());
      if (random() % 9 == 0) h.operation.kind = static_cast<Kind>(random());
      if (random() % 2) h.in_offset = random() % 2 ? random() : random() % (1 << 18);
      if (random() % 2) h.shared = static_cast<std::uint32_t>(random() % 8);
      for (int p = 0; p < 2; ++p)
        layout.row(segment->base(), 1, work->sequence())[p] = random() % 3 ? r.count : random();
      other.issued = random() % 4 ? work->sequence() + 1 : small();
      other.posted = small();
      other.reduced = small();
      other.done = small();
      to_me.posted = small();
      to_me.filled = small();
      to_me.grants = small();
      from_me.taken = small();
      from_me.emptied = small();
      from_me.grants = small();
      from_me.granted_id = small();
      for (auto& e : to_me.envelopes) {
        e.id = small();
        e.bytes = small();
        e.dtype = static_cast<std::uint32_t>(random() % 20);
        e.inlined = static_cast<std::uint32_t>(random() % 2);
        e.tag = 0;
      }
      if (random() % 10 == 0) {
        std::memset(other.abort.text, 'x', sizeof(other.abort.text));
        other.abort.kind = static_cast<FailureKind>(random() % 8);
        other.abort.peer = static_cast<int>(random());
        other.abort.state = 1;
        layout.header(segment->base())->aborts = 1;
      }
      for (int i = 0; i < 4; ++i) core->progress(i == 3);
    }
    core->abort({FailureKind::aborted, -1, "end"});
    core->release();
  });
}
