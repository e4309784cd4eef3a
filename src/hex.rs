//! Hexadecimal digits, in escapes of paths and certificate subjects.

/// What a digit stands for; `None` if it is none.
pub fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}
