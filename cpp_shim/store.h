// A c10d store for the engine's rendezvous.
#pragma once

#include "bridge_types.h"
#include "torch_compat.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace accl::bridge {

// Shares the store's connection: only short questions go over it, so that no other user of it is held up. (A clone would be a
// connection of its own for every group, and c10d looks the server's name up for each.) Dropped when the group is made.
class StoreRef {
 public:
  explicit StoreRef(c10::intrusive_ptr<c10d::Store> store) : store(std::move(store)) {}

  // Host name of the server, or empty for stores without one.
  std::string master() const {
    const auto* tcp = dynamic_cast<const c10d::TCPStore*>(root());
    return tcp != nullptr ? tcp->getHost() : std::string();
  }

  // The store beneath all prefixes.
  const c10d::Store* root() const {
    const auto* below = store.get();
    while (const auto* prefix = dynamic_cast<const c10d::PrefixStore*>(below)) {
      below = const_cast<c10d::PrefixStore*>(prefix)->getUnderlyingStore().get();
    }
    return below;
  }

  c10::intrusive_ptr<c10d::Store> store;
};

}  // namespace accl::bridge
