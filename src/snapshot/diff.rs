/*! What changed from one text to another, line by line, for people. */

/// Lines shown of one snapshot; a review shows all.
const SHOWN: usize = 12;
/// Most pairs of lines that are held against each other; beyond it, all lines count as changed.
const PAIRS: usize = 4_000_000;

/// Lines that only one text has, `- ` and `+ ` before them, the first few.
pub fn short(old: &str, new: &str) -> Vec<String> {
    let all = lines(old, new);
    let more = all.len().saturating_sub(SHOWN);
    let mut shown: Vec<String> = all.into_iter().take(SHOWN).collect();
    if more > 0 {
        shown.push(format!("… and {more} more lines"));
    }
    shown
}

/// Lines outside a longest common subsequence.
fn lines(old: &str, new: &str) -> Vec<String> {
    let (a, b): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let (a, b) = (&a[same..], &b[same..]);
    let end = a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count();
    let (a, b) = (&a[..a.len() - end], &b[..b.len() - end]);
    let width = b.len() + 1;
    // length[i][j]: of the longest common subsequence of a[i..] and b[j..].
    let compared = a.len().saturating_mul(b.len()) <= PAIRS;
    let mut length = vec![0u32; if compared { (a.len() + 1) * width } else { 0 }];
    if compared {
        for i in (0..a.len()).rev() {
            for j in (0..b.len()).rev() {
                let (down, right) = (length[(i + 1) * width + j], length[i * width + j + 1]);
                length[i * width + j] =
                    if a[i] == b[j] { length[(i + 1) * width + j + 1] + 1 } else { down.max(right) };
            }
        }
    }
    let (mut i, mut j, mut out) = (0, 0, Vec::new());
    while i < a.len() || j < b.len() {
        if compared && i < a.len() && j < b.len() && a[i] == b[j] {
            (i, j) = (i + 1, j + 1);
        } else if i < a.len()
            && (j == b.len() || !compared || length[(i + 1) * width + j] >= length[i * width + j + 1])
        {
            out.push(format!("- {}", a[i]));
            i += 1;
        } else {
            out.push(format!("+ {}", b[j]));
            j += 1;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        assert_eq!(lines("a\nb\nc\nd", "a\nx\nc\ny\nd"), ["- b", "+ x", "+ y"]);
        assert_eq!(lines("", "a"), ["+ a"]);
        assert_eq!(lines("a\nb", "a"), ["- b"]);
        assert!(lines("a\nb", "a\nb").is_empty());
    }

    /// A file that is no snapshot may be long: no quadratic work, and a few lines on the screen.
    #[test]
    fn long_texts_are_cut() {
        let long = |c: &str| (0..100_000).map(|i| format!("{c}{i}\n")).collect::<String>();
        let shown = short(&long("a"), &long("b"));
        assert_eq!(shown.len(), SHOWN + 1);
        assert_eq!(shown[SHOWN], format!("… and {} more lines", 200_000 - SHOWN));
    }
}
