//! Damage of model files at random: bits, cuts, splices, and numbers of the header replaced by ones that are hard.

/// Numbers from a counter.
pub struct Draw(pub u64);

impl Draw {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Where the numbers of a sound file's header lie: (offset, bytes).
pub fn fields(file: &[u8]) -> Vec<(usize, usize)> {
    let mut f = Fields { file, at: 4, found: Vec::new() };
    f.number(4);
    let tensors = f.number(8);
    let pairs = f.number(8);
    for _ in 0..pairs {
        f.string();
        let ty = f.number(4);
        f.value(ty);
    }
    for _ in 0..tensors {
        f.string();
        let n = f.number(4);
        for _ in 0..n {
            f.number(8);
        }
        f.number(4);
        f.number(8);
    }
    f.found
}

struct Fields<'a> {
    file: &'a [u8],
    at: usize,
    found: Vec<(usize, usize)>,
}

impl Fields<'_> {
    fn number(&mut self, bytes: usize) -> u64 {
        self.found.push((self.at, bytes));
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(&self.file[self.at..self.at + bytes]);
        self.at += bytes;
        u64::from_le_bytes(value)
    }
    fn string(&mut self) {
        let n = self.number(8) as usize;
        // A letter of a name is as good as a number.
        if n > 0 {
            self.found.push((self.at + n / 2, 1));
        }
        self.at += n;
    }
    fn value(&mut self, ty: u64) {
        match ty {
            8 => self.string(),
            9 => {
                let element = self.number(4);
                let n = self.number(8);
                (0..n).for_each(|_| self.value(element));
            }
            0 | 1 | 7 => _ = self.number(1),
            2 | 3 => _ = self.number(2),
            4..=6 => _ = self.number(4),
            _ => _ = self.number(8),
        }
    }
}

/// A number that is hard to take.
fn hard(draw: &mut Draw, length: u64) -> u64 {
    let near = [0, length, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX];
    match draw.below(5) {
        0 => near[draw.below(near.len())].wrapping_add(draw.next() % 3).wrapping_sub(1),
        1 => 1 << draw.below(64),
        2 => (1u64 << draw.below(64)).wrapping_sub(1),
        3 => draw.next() % 512,
        _ => draw.next(),
    }
}

/// Damages a file in one to three ways; `other` is what splices come from.
pub fn damage(file: &mut Vec<u8>, fields: &[(usize, usize)], other: &[u8], draw: &mut Draw) {
    let header = fields.last().map_or(file.len(), |f| f.0 + f.1);
    for _ in 0..1 + draw.below(3) {
        if file.len() < 16 {
            return;
        }
        // Mostly in the header: what is behind it is only numbers.
        let within = if draw.below(4) > 0 { header.min(file.len()) } else { file.len() };
        let at = draw.below(within);
        match draw.below(8) {
            0 | 1 => file[at] ^= 1 << draw.below(8),
            2 => file[at] = draw.next() as u8,
            3 => file.truncate(at),
            4 => {
                let n = draw.below(64).min(other.len()).min(file.len() - at);
                let from = draw.below(other.len() - n + 1);
                file[at..at + n].copy_from_slice(&other[from..from + n]);
            }
            5 => {
                let n = draw.below(40).min(file.len() - at);
                if draw.below(2) == 0 {
                    file.drain(at..at + n);
                } else {
                    let copy = file[at..at + n].to_vec();
                    file.splice(at..at, copy);
                }
            }
            _ => {
                let (at, bytes) = fields[draw.below(fields.len())];
                if at + bytes <= file.len() {
                    let value = hard(draw, file.len() as u64).to_le_bytes();
                    file[at..at + bytes].copy_from_slice(&value[..bytes]);
                }
            }
        }
    }
}
