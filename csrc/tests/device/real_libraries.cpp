// real_libraries NCCL [CUDART]: opens the vendor's own libraries through Axo's tables, where there is no GPU.
// Prints "nccl VERSION registration windows one_call zero_cta" and "cudart VERSION capture"; fails when a function
// lacks.
#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "device/nccl_api.h"

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw axo::Error("usage: real_libraries NCCL [CUDART]");
    ::setenv("AXO_NCCL_LIBRARY", argv[1], 1);
    const auto nccl = axo::NcclApi::open(axo::GpuVendor::cuda);
    if (!axo::same_file(nccl->path(), argv[1])) throw axo::Error("opened " + nccl->path());
    axo::NcclUniqueId id{};
    nccl->check((*nccl)->GetUniqueId(&id), "ncclGetUniqueId");
    int set = 0;
    for (char byte : id.bytes) set += byte != 0;
    if (set == 0) throw axo::Error("ncclGetUniqueId left the id empty");
    const bool one_call = (*nccl)->Gather && (*nccl)->Scatter && (*nccl)->AlltoAll;
    std::printf("nccl %d %d %d %d %d\n", nccl->version(), nccl->has_registration(), nccl->has_windows(), one_call,
                nccl->has_zero_cta());
    // The library's own words for an error, through the table.
    std::printf("text %s\n", nccl->error_text("ncclAllReduce", axo::kNcclInvalidArgument).c_str());
    if (argc > 2) {
      const auto cuda = axo::GpuRuntime::open(axo::GpuVendor::cuda, {argv[2]});
      std::printf("cudart %d %s\n", cuda->version(), cuda->path().c_str());
      std::printf("text %s\n", cuda->error_text(400).c_str());
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
