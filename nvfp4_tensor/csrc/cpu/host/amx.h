// Whether this process may use AMX.
#pragma once

namespace nvfp4 {

// The CPU multiplies tiles of bfloat16, the system saves them, and has granted their use, which is asked for once, for
// all threads. A system refuses where it is too old, is told to, or where a thread's signal stack is too small.
bool amx_is_granted();

}  // namespace nvfp4
