//! Arguments of the programs that measure by turns: words that choose cases, and `--json`.

use serde_json::Value;

/// What was asked for.
#[derive(Debug)]
pub struct Arguments {
    /// Whether the figures are printed as one JSON array, and nothing else is.
    pub json: bool,
    words: Vec<String>,
}

impl Arguments {
    /// Those of this process. Other options, such as those that cargo adds, are for others.
    pub fn of_process() -> Self {
        let (options, words): (Vec<String>, Vec<String>) =
            std::env::args().skip(1).partition(|word| word.starts_with('-'));
        Self { json: options.iter().any(|option| option == "--json"), words }
    }

    /// Whether one of the words is part of this id, or there are none.
    pub fn want(&self, id: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| id.contains(word.as_str()))
    }

    /// Prints a line for people.
    pub fn say(&self, line: &str) {
        if !self.json {
            println!("{line}");
        }
    }

    /// Prints all figures at the end for programs.
    pub fn end(&self, figures: Vec<Value>) {
        if self.json {
            println!("{}", Value::Array(figures));
        }
    }
}
