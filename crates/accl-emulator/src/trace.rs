//! Trace of engine traffic, one line per event, in the format of the recordings.
//!
//! Owns the file and a thread that writes it. Callers do not wait for the disk unless it is far behind. Read [`Trace`] first.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Bytes of queued lines at which callers wait.
const MOST_BYTES: usize = 64 << 20;

/// A traced event.
enum Line {
    Exchange { rank: u32, request: Vec<u8>, reply: String },
    Packet { from: u32, to: u32, packet: Vec<u8> },
}

impl Line {
    fn len_bytes(&self) -> usize {
        match self {
            Self::Exchange { request, reply, .. } => request.len() + reply.len(),
            Self::Packet { packet, .. } => packet.len(),
        }
    }
}

/// Lines that are yet to be written.
#[derive(Default)]
struct Queue {
    lines: VecDeque<Line>,
    bytes: usize,
    /// Set when no more lines will be queued, or when the thread has stopped writing.
    is_over: bool,
}

#[derive(Default)]
struct SharedQueue {
    queue: Mutex<Queue>,
    has_changed: Condvar,
}

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.has_changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.lock().is_over = true;
        self.has_changed.notify_all();
    }
}

/// File with the traffic of engines. All lines passed to a `Trace` are in the file once the `Trace` is dropped.
pub(crate) struct Trace {
    shared: Arc<SharedQueue>,
    thread: Option<JoinHandle<()>>,
}

impl Trace {
    /// Creates the file.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        // Avoids the numbers of the standard streams, so that output which the process prints cannot reach the file.
        let file = BufWriter::new(File::from(rustix::io::fcntl_dupfd_cloexec(File::create(path)?, 3)?));
        let shared = Arc::new(SharedQueue::default());
        let (path, to_write) = (path.to_owned(), shared.clone());
        let write = move || {
            if let Err(error) = write_all(file, &to_write) {
                eprintln!("accl-emulator: --trace stops here: {} cannot be written: {error}", path.display());
                to_write.end();
            }
        };
        let thread = std::thread::Builder::new().name("trace".to_owned()).spawn(write)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn write(&self, line: Line) {
        let mut queue = self.shared.lock();
        while queue.bytes > MOST_BYTES && !queue.is_over {
            queue = self.shared.wait(queue);
        }
        // If the thread has stopped writing, it has already printed the reason.
        if !queue.is_over {
            queue.bytes += line.len_bytes();
            queue.lines.push_back(line);
            self.shared.has_changed.notify_all();
        }
    }

    /// Traces a request of a rank's host and its reply.
    pub(crate) fn exchange(&self, rank: u32, request: &[u8], reply: &str) {
        self.write(Line::Exchange { rank, request: request.to_vec(), reply: reply.to_owned() });
    }

    /// Traces a packet from one engine to another.
    pub(crate) fn packet(&self, from: u32, to: u32, packet: &[u8]) {
        self.write(Line::Packet { from, to, packet: packet.to_vec() });
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Writes lines until the trace is closed and empty. Whenever the queue is empty, all earlier lines are in the file.
fn write_all(mut file: BufWriter<File>, shared: &SharedQueue) -> io::Result<()> {
    let mut number = 0;
    loop {
        let mut queue = shared.lock();
        let lines = std::mem::take(&mut queue.lines);
        if lines.is_empty() {
            if queue.is_over {
                return Ok(());
            }
            drop(shared.wait(queue));
            continue;
        }
        drop(queue);
        for line in lines {
            file.write_all(text_of(number, &line).as_bytes())?;
            number += 1;
            shared.lock().bytes -= line.len_bytes();
            shared.has_changed.notify_all();
        }
        file.flush()?;
    }
}

fn text_of(number: u64, line: &Line) -> String {
    match line {
        Line::Exchange { rank, request, reply } => {
            // A request that is not JSON is written as a string.
            let text = String::from_utf8_lossy(request);
            let is_json =
                serde_json::from_slice::<serde::de::IgnoredAny>(request).is_ok() && !text.contains(['\n', '\r']);
            let request = if is_json { text.into_owned() } else { one_line(&text) };
            format!(
                "{{\"n\":{number},\"scene\":\"\",\"kind\":\"ctrl\",\"rank\":{rank},\"request\":{request},\"reply\":{reply}}}\n"
            )
        }
        Line::Packet { from, to, packet } => {
            let mut text = format!(
                "{{\"n\":{number},\"scene\":\"\",\"kind\":\"wire\",\"topic\":\"{to:04}\",\"sender\":\"{from}\",\"hex\":\""
            );
            text.reserve(2 * packet.len() + 3);
            for byte in packet {
                let _ = write!(text, "{byte:02x}");
            }
            text.push_str("\"}\n");
            text
        }
    }
}

/// Returns JSON on one line, or a text that is not JSON as a string.
fn one_line(text: &str) -> String {
    let value = serde_json::from_str(text).unwrap_or_else(|_| serde_json::Value::from(text));
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_recordings() {
        let exchange = |request: &[u8]| {
            text_of(3, &Line::Exchange { rank: 1, request: request.to_vec(), reply: r#"{"status":0}"#.to_owned() })
        };
        let around = |request: &str| {
            format!(
                "{{\"n\":3,\"scene\":\"\",\"kind\":\"ctrl\",\"rank\":1,\"request\":{request},\"reply\":{{\"status\":0}}}}\n"
            )
        };
        assert_eq!(exchange(br#"{"type":6,"ctrl_id":0}"#), around(r#"{"type":6,"ctrl_id":0}"#));
        assert_eq!(exchange(b"{\n\"type\": 6}"), around(r#"{"type":6}"#));
        assert_eq!(exchange(b"no \"JSON\""), around(r#""no \"JSON\"""#));
        let packet = text_of(4, &Line::Packet { from: 0, to: 12, packet: vec![0, 255, 16] });
        assert_eq!(
            packet,
            "{\"n\":4,\"scene\":\"\",\"kind\":\"wire\",\"topic\":\"0012\",\"sender\":\"0\",\"hex\":\"00ff10\"}\n"
        );
    }
}
