//! Arguments of the programs that measure alternately: words that select cases, and `--json`.

use serde_json::Value;

/// The arguments of a program.
#[derive(Debug)]
pub struct Arguments {
    /// Whether the figures are printed as one JSON array, without any other output.
    pub json: bool,
    words: Vec<String>,
}

impl Arguments {
    /// Arguments of this process. Other options, such as those that cargo adds, are ignored.
    pub fn of_process() -> Self {
        let (options, words): (Vec<String>, Vec<String>) =
            std::env::args().skip(1).partition(|word| word.starts_with('-'));
        Self { json: options.iter().any(|option| option == "--json"), words }
    }

    /// Returns whether one of the words is part of this id, or there are no words.
    pub fn want(&self, id: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| id.contains(word.as_str()))
    }

    /// Prints a line, unless the output is JSON.
    pub fn say(&self, line: &str) {
        if !self.json {
            println!("{line}");
        }
    }

    /// Prints all figures at the end, if the output is JSON.
    pub fn end(&self, figures: Vec<Value>) {
        if self.json {
            println!("{}", Value::Array(figures));
        }
    }
}
