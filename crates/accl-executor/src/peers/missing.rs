//! Formats the ranks to which there is no link, for messages.
//!
//! This module owns the wording, and the number of ranks that are listed. `Net` records why a link is not up yet. Read
//! [`unlinked`] first.

use accl_types::Rank;

use super::net::{Net, PeerId};

/// Maximum number of ranks that are listed.
const MAX_LISTED: usize = 8;

/// Lists ranks and reasons: `rank 1 (host a, pid 7): no connection from it yet; rank 2 ...`.
pub fn unlinked(missing: &[(Rank, PeerId)], net: &Net) -> String {
    let why = |&(rank, peer): &(Rank, PeerId)| {
        let why = net.why_gone(peer).or_else(|| net.trouble(peer).map(str::to_owned));
        format!("rank {rank} ({}): {}", net.host_and_pid(peer), why.as_deref().unwrap_or("no connection from it yet"))
    };
    let listed: Vec<String> = missing.iter().take(MAX_LISTED).map(why).collect();
    let more = if missing.len() > MAX_LISTED { "; ..." } else { "" };
    listed.join("; ") + more
}

#[cfg(test)]
mod tests {
    use accl_types::Error;
    use accl_wire::EndpointInfo;

    use super::*;

    #[test]
    fn who_has_no_link_is_listed_with_the_reason_as_far_as_it_is_known() {
        let mut net = Net::default();
        let info = |pid: u32| EndpointInfo {
            version: accl_wire::PROTOCOL_VERSION,
            uuid: [pid as u8; 16],
            pid,
            uid: 0,
            hostname: "a".to_owned(),
            host_id: String::new(),
            addresses: Vec::new(),
            unix_name: String::new(),
            transports: Vec::new(),
            lanes: 1,
        };
        let peers: Vec<PeerId> = (0..9).map(|pid| net.introduce(&info(pid), false)).collect();
        net.set_trouble(&info(1).uuid, "no answer from 10.0.0.2:4000 yet");
        net.mark_gone(peers[2], Error::peer_lost("its process has ended"));
        let missing: Vec<(Rank, PeerId)> = (0..9).map(|rank| (Rank(rank), peers[rank as usize])).collect();
        let text = unlinked(&missing[..3], &net);
        let [first, second, third] = &text.split("; ").collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert_eq!(*first, "rank 0 (host a, pid 0): no connection from it yet");
        assert_eq!(*second, "rank 1 (host a, pid 1): no answer from 10.0.0.2:4000 yet");
        assert_eq!(*third, "rank 2 (host a, pid 2): its process has ended");
        assert!(unlinked(&missing, &net).ends_with("rank 7 (host a, pid 7): no connection from it yet; ..."));
    }
}
