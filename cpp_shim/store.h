// A c10d store for the engine's rendezvous.
#pragma once

#include "bridge_types.h"
#include "torch_compat.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace accl::bridge {

// Shares the store's connection: only short requests use it, so no other user of the store is delayed. A clone would be
// a connection per group, and c10d would look up the server's name for each. Dropped once the group is created.
class StoreRef {
 public:
  explicit StoreRef(c10::intrusive_ptr<c10d::Store> store) : store(std::move(store)) {}

  // Host name of the server, or empty for stores without a server.
  std::string master() const {
    const auto* tcp = dynamic_cast<const c10d::TCPStore*>(root());
    return tcp != nullptr ? tcp->getHost() : std::string();
  }

  // The store below all prefixes.
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
