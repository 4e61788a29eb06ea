// torch's dispatcher on the way to c10d's collectives.
#pragma once

namespace axo {

// Once a process, after torch.distributed is imported: collectives of tensors that require no gradient no longer box
// their arguments. What they do, and what torch warns of, stays.
void shorten_c10d_dispatch();

}  // namespace axo
