// See profile.h.
#include "profile.h"

#include <algorithm>
#include <string_view>

namespace accl {

namespace {

// `all_reduce` of `accl:all_reduce`.
std::string_view collective(const char* title) {
  const std::string_view whole(title);
  return whole.substr(whole.find(':') + 1);
}

// As c10d's functions are called: `allreduce`, `alltoall`, but `reduce_scatter`.
std::string c10ds(const char* title) {
  std::string name(collective(title));
  if (name.rfind("all_", 0) == 0) name.erase(std::remove(name.begin(), name.end(), '_'), name.end());
  return name;
}

}  // namespace

std::string ProfileNames::call(const char* title) const {
  switch (style_) {
    case Style::Ccl: return "oneccl_bindings_for_pytorch::" + c10ds(title);
    case Style::Pg: return "pg::" + c10ds(title);
    case Style::Accl: break;
  }
  return title;
}

std::string ProfileNames::wait(const char* title, int64_t elements) const {
  switch (style_) {
    case Style::Ccl: return "oneccl_bindings_for_pytorch::wait::cpu::" + c10ds(title);
    case Style::Pg: return "pg::wait::" + c10ds(title) + "::sz:" + std::to_string(elements);
    case Style::Accl: break;
  }
  return "accl:wait:" + std::string(collective(title));
}

}  // namespace accl
