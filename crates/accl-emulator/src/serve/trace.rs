//! What goes in and out of engines, line by line in the format of the recordings.
//!
//! Owns the file and a thread that writes it: who has something to write waits for nothing unless the disk is far behind. Read [`Trace`] first.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;

/// Lines that are yet to be written, before who writes more waits.
const MOST_LINES: usize = 4096;

/// Something that has gone in or out.
enum Line {
    Exchange { rank: u32, request: Vec<u8>, reply: String },
    Packet { from: u32, to: u32, packet: Vec<u8> },
}

/// A file of all that goes in and out. What was told it is in the file once this is gone.
pub(crate) struct Trace {
    lines: Option<SyncSender<Line>>,
    thread: Option<JoinHandle<()>>,
}

impl Trace {
    /// A new file at this place.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = BufWriter::new(File::create(path)?);
        let (lines, to_write) = sync_channel(MOST_LINES);
        let path = path.to_owned();
        let write = move || {
            if let Err(error) = write_all(file, &to_write) {
                eprintln!("accl-emulator: --trace ends here, {} cannot be written: {error}", path.display());
            }
        };
        let thread = std::thread::Builder::new().name("trace".to_owned()).spawn(write)?;
        Ok(Self { lines: Some(lines), thread: Some(thread) })
    }

    fn write(&self, line: Line) {
        // Whoever writes has said so if it does not any more.
        let _ = self.lines.as_ref().map(|lines| lines.send(line));
    }

    /// A request of a rank's host and its reply.
    pub(crate) fn exchange(&self, rank: u32, request: &[u8], reply: &str) {
        self.write(Line::Exchange { rank, request: request.to_vec(), reply: reply.to_owned() });
    }

    /// A packet of one engine to another.
    pub(crate) fn packet(&self, from: u32, to: u32, packet: &[u8]) {
        self.write(Line::Packet { from, to, packet: packet.to_vec() });
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Until nobody has anything more. Whenever nothing is left, all is in the file.
fn write_all(mut file: BufWriter<File>, lines: &Receiver<Line>) -> io::Result<()> {
    for number in 0u64.. {
        let line = match lines.try_recv() {
            Ok(line) => Some(line),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                lines.recv().ok()
            }
            Err(TryRecvError::Disconnected) => None,
        };
        let Some(line) = line else { break };
        file.write_all(text_of(number, &line).as_bytes())?;
    }
    file.flush()
}

fn text_of(number: u64, line: &Line) -> String {
    match line {
        Line::Exchange { rank, request, reply } => {
            // What is no JSON stands there as a string.
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

/// JSON over several lines in one, or a string of what is none.
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
