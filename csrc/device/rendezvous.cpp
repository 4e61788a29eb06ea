#include "device/rendezvous.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/identity.h"
#include "base/work_state.h"

namespace axo {

// The host as the library tells hosts apart (utils.cc, getHostHash): by NCCL_HOSTID where that is set, also to nothing,
// else by the kernel's boot id, since a container has a hostname of its own. Ranks whose hosts differ may be on one
// GPU: the library then takes the network between them. In digits, since the user's text may hold anything.
std::string host_of_library() {
  constexpr std::size_t kCompared = 1023;
  const char* id = std::getenv("NCCL_HOSTID");
  if (id == nullptr) return boot_id();
  return "id:" + hex_digits(reinterpret_cast<const unsigned char*>(id), std::min(std::strlen(id), kCompared));
}

namespace {

// What tells one table of composed collectives from another; "" for none.
std::string digest(const std::vector<Composed>& table) {
  std::string text;
  for (const Composed& one : table) {
    text += std::to_string(one.hosts) + " " + std::to_string(one.local) + " " + name_of(one.kind) + " " +
            std::to_string(one.least) + "\n";
  }
  return table.empty() ? "" : " with composition table " + std::to_string(std::hash<std::string>{}(text) % 1000000);
}

// What must agree between ranks, and the GPU, which must not: "<library and version>\n<host, uuid and bus id>".
std::string introduction(const DeviceContext& context, const DeviceOptions& options) {
  return std::string(context.nccl().transport()) + " " + context.nccl().version_text() + digest(options.composed) +
         "\n" + host_of_library() + " " + context.gpu().device_uuid(context.device()) + " " +
         context.gpu().pci_bus_id(context.device());
}

// Rank 0's verdict over all introductions: empty, or what is wrong. Without `parts` the library tells GPUs apart by
// their bus ids, which parts of one GPU (MIG) share.
std::string verdict(const std::vector<std::string>& introductions, bool shared_gpus, bool parts) {
  std::map<std::string, std::size_t> owners;
  const auto library = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  const auto bus_id = [](const std::string& text) { return text.substr(text.rfind(' ') + 1); };
  const auto gpu = [&](const std::string& text) {
    const std::string place = text.substr(text.find('\n') + 1);
    return parts ? place : place.substr(0, place.find(' ') + 1) + bus_id(text);
  };
  for (std::size_t rank = 0; rank < introductions.size(); ++rank) {
    const std::string& text = introductions[rank];
    if (library(text) != library(introductions[0])) {
      return "rank " + std::to_string(rank) + " has " + library(text) + ", rank 0 has " + library(introductions[0]) +
             "; all ranks need the same";
    }
    const auto [owner, first] = owners.emplace(gpu(text), rank);
    if (!first && !shared_gpus && text != introductions[owner->second]) {
      return "ranks " + std::to_string(owner->second) + " and " + std::to_string(rank) + " are on parts of one GPU (" +
             bus_id(text) + "), which NCCL takes for the same before 2.30; take NCCL 2.30 or newer, or a GPU for each";
    }
    if (!first && !shared_gpus) {
      return "ranks " + std::to_string(owner->second) + " and " + std::to_string(rank) + " are on the same GPU (" +
             bus_id(text) +
             "); give each its own device (NCCL 2.30 and newer can share one with NCCL_MULTI_RANK_GPU_ENABLE=1, and "
             "processes with an NCCL_HOSTID of their own share one over the network, for tests)";
    }
  }
  return "";
}

}  // namespace

NcclUniqueId new_id(DeviceContext& context) {
  const auto turn = context.queue().turn();
  NcclUniqueId id{};
  context.nccl().check(context.nccl()->GetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

// The value of a key, once it is there; a rank that dies and a caller who gives up end the wait.
std::string Rendezvous::await(const std::string& part, Clock::time_point deadline) const {
  constexpr auto kLook = std::chrono::milliseconds(250);  // between looks at who has died
  const auto longest = std::clamp(std::chrono::milliseconds(size), std::chrono::milliseconds(50), 4 * kLook);
  auto pause = std::chrono::milliseconds(1);
  auto next_look = Clock::now() + kLook / 2;
  while (!store.has(key + part)) {
    check_interrupt();
    if (options.cancelled && options.cancelled->load()) {
      throw Aborted("aborted while its ranks met");
    }
    const bool looks = Clock::now() >= next_look;
    if (looks) next_look = Clock::now() + kLook;
    if (const int lost = looks ? peers.lost() : -1; lost >= 0) {
      throw PeerLost(peers.title(lost) + " died before all had come", lost);
    }
    if (Clock::now() >= deadline) throw Timeout("no rank has set '" + part + "'");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, longest);
  }
  return store.get(key + part, limited(options.timeout));
}

// The introductions of all ranks.
std::vector<std::string> Rendezvous::introductions() const {
  const auto deadline = deadline_after(options.timeout);
  std::vector<std::string> all;
  try {
    for (int r = 0; r < size; ++r) all.push_back(await("/hello/" + std::to_string(r), deadline));
    return all;
  } catch (const Timeout&) {
    std::string missing;
    int count = 0;
    for (int r = 0; r < size; ++r) {
      if (store.has(key + "/hello/" + std::to_string(r))) continue;
      missing += (count++ ? ", " : "") + std::to_string(r);
    }
    throw Timeout((count > 1 ? "ranks " + missing + " have" : "rank " + missing + " has") + " not come within " +
                  std::to_string(limited(options.timeout).count()) + " ms");
  }
}

// Rank 0's answer to all.
std::string Rendezvous::answer(DeviceContext& context) const {
  const auto all = introductions();
  const char* multi = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool shared = context.nccl().version() >= 23000 && multi && std::strcmp(multi, "1") == 0;
  const bool parts = context.nccl().version() >= 23000;
  const std::string wrong = verdict(all, shared, parts);
  if (!wrong.empty()) return "no " + wrong;
  const NcclUniqueId id = new_id(context);
  return "ok " + std::string(id.bytes, sizeof id.bytes);
}

// What `wait` gives, or an error as the text that says it to other ranks too.
std::string Rendezvous::told(const std::function<std::string()>& wait) {
  try {
    return wait();
  } catch (const Timeout& e) {
    return std::string("late ") + e.what();
  } catch (const PeerLost& e) {
    return "lost " + std::to_string(e.peer()) + " " + e.what();
  } catch (const Aborted& e) {
    return std::string("stop ") + e.what();
  } catch (const Error& e) {
    return std::string("no ") + e.what();
  }
}

// Every rank learns the unique id, or the same error.
NcclUniqueId Rendezvous::meet(DeviceContext& context) const {
  store.set(key + "/hello/" + std::to_string(rank), introduction(context, options));
  if (rank == 0) store.set(key + "/id", told([&] { return answer(context); }));
  // Rank 0 may take the whole timeout to find out who is missing: its answer is worth waiting for.
  const auto deadline = deadline_after(2 * limited(options.timeout));
  const std::string answered = told([&] { return await("/id", deadline); });
  const std::string kind = answered.substr(0, answered.find(' '));
  const std::string text = answered.substr(std::min(kind.size() + 1, answered.size()));
  const std::string who = "rendezvous of GPU ranks for '" + options.name + "': ";
  if (kind == "ok") {
    NcclUniqueId id{};
    AXO_CHECK(text.size() == sizeof id.bytes, "rendezvous: bytes of the unique id", text.size(), "128");
    std::memcpy(id.bytes, text.data(), sizeof id.bytes);
    return id;
  }
  if (kind == "late") throw Timeout(who + text);
  if (kind == "stop") throw Aborted(who + text);
  if (kind == "lost") throw PeerLost(who + text.substr(text.find(' ') + 1), std::atoi(text.c_str()));
  throw Error("rendezvous of GPU ranks: " + (kind == "no" ? text : "bad answer from rank 0"));
}

}  // namespace axo
