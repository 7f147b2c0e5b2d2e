// How gate and up are combined: values of nvfp4::gated's argument.
#pragma once

namespace nvfp4 {
namespace step {

enum class Activation { kSilu, kGeluTanh, kGelu, kClampedGlu, kCount };

}  // namespace step
}  // namespace nvfp4
