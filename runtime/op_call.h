// Calls an op of the registry on the ExecuTorch thread pool.
#pragma once

#include "glimmer/registry.h"

namespace glimmer {

Context host_context();  // executorch's parallel_for and the process's exact mode

// Checks the arguments of op i and gives the shapes of its outputs.
Status infer_op(int i, Arg* args, Shape* outs);
// Runs op i on outputs of exactly the inferred shapes.
Status run_op(int i, Arg* args, Tensor* outs);

// The message of the last op that failed inside an ExecuTorch method of this process, which itself
// reports only a code. Taking it clears it.
std::string take_op_error();
void set_op_error(std::string message);

}  // namespace glimmer
