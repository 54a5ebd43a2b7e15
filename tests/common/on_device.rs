//! What every device must do, written once: the kernels of fixtures/device/probe.cu, launched on whatever is given.
#![allow(dead_code)]

use mla_check::device::{Arg, Buffer, Device, Error, Launch, Module, Pattern, Problem};

/// A test of any device, with the kernels loaded.
pub type Body = fn(&mut dyn Device, Module);

/// By name.
pub const ALL: [(&str, Body); 9] = [
    ("copies", copies),
    ("fresh_memory_is_poisoned", fresh_memory_is_poisoned),
    ("patterns", patterns),
    ("arguments_of_each_type", arguments_of_each_type),
    ("arguments_as_one_struct", arguments_as_one_struct),
    ("axes", axes),
    ("shared_memory", shared_memory),
    ("launches_in_order", launches_in_order),
    ("refusals", refusals),
];

pub fn launch(
    device: &mut dyn Device,
    module: Module,
    kernel: &str,
    threads: u32,
    arguments: &[Arg],
) -> Result<(), Error> {
    let (grid, block) = ([1; 3], [threads, 1, 1]);
    device.launch(&Launch { module, kernel, grid, block, dynamic_shared: 0, arguments })
}

pub fn read(device: &mut dyn Device, buffer: Buffer, bytes: usize) -> Vec<u8> {
    let mut held = vec![0x77; bytes];
    device.read(buffer, 0, &mut held).unwrap();
    held
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Numbers that differ from their neighbours.
fn some(n: u32) -> Vec<u8> {
    (0..n).flat_map(|i| i.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect()
}

fn copies(device: &mut dyn Device, module: Module) {
    for bytes in [1usize, 7, 4096, (1 << 20) + 3] {
        let buffer = device.allocate(bytes as u64, "copied").unwrap();
        let data: Vec<u8> = some(bytes as u32 / 4 + 1)[..bytes].into();
        let (head, tail) = data.split_at(bytes / 3);
        device.write(buffer, head.len() as u64, tail).unwrap();
        device.write(buffer, 0, head).unwrap();
        assert_eq!(read(device, buffer, bytes), data, "{bytes}");
        let mut part = vec![0; bytes - bytes / 2];
        device.read(buffer, bytes as u64 / 2, &mut part).unwrap();
        assert_eq!(part, data[bytes / 2..]);
        for (at, n) in [(bytes, 1), (bytes + 1, 0), (usize::MAX, 2)] {
            let error = device.write(buffer, at as u64, &vec![0; n]).unwrap_err();
            assert!(matches!(error.problem(), Problem::Range { .. }), "{error}");
            assert_eq!(error.place(), "copied");
            assert!(device.read(buffer, at as u64, &mut vec![0; n]).is_err());
        }
        device.free(buffer).unwrap();
    }
    let data = some(1000);
    let [from, to] = ["from", "to"].map(|what| device.allocate(4000, what).unwrap());
    device.write(from, 0, &data).unwrap();
    let (grid, block) = ([4, 1, 1], [256, 1, 1]);
    let arguments = [Arg::In(from), Arg::InOut(to), 999u32.into()];
    let launch = Launch { module, kernel: "copy", grid, block, dynamic_shared: 0, arguments: &arguments };
    device.launch(&launch).unwrap();
    let copied = read(device, to, 4000);
    assert_eq!(copied[..3996], data[..3996]);
    assert_eq!(copied[3996..], [0xff; 4], "the last word was not asked for");
    device.check_guards().unwrap();
    // The same without a kernel.
    let again = device.allocate(3000, "again").unwrap();
    device.copy(to, again, 2999).unwrap();
    let copied = read(device, again, 3000);
    assert_eq!((&copied[..2999], copied[2999]), (&data[..2999], 0xff));
    for (from, to) in [(again, to), (to, again)] {
        let error = device.copy(from, to, 3001).unwrap_err();
        assert!(matches!(error.problem(), Problem::Range { .. }), "{error}");
    }
    device.check_guards().unwrap();
}

fn fresh_memory_is_poisoned(device: &mut dyn Device, _: Module) {
    for bytes in [0u64, 1, 3, 1000, 1 << 20] {
        // What was just freed is what a pool would give again.
        for _ in 0..3 {
            let buffer = device.allocate(bytes, "fresh").unwrap();
            assert!(read(device, buffer, bytes as usize).iter().all(|b| *b == 0xff), "{bytes}");
            device.write(buffer, 0, &vec![0x11; bytes as usize]).unwrap();
            device.free(buffer).unwrap();
            assert!(matches!(device.free(buffer).unwrap_err().problem(), Problem::Buffer));
            assert!(matches!(device.read(buffer, 0, &mut []).unwrap_err().problem(), Problem::Buffer));
        }
    }
    let error = device.allocate(1 << 50, "cache").unwrap_err();
    assert!(matches!(error.problem(), Problem::Memory { .. }) && error.place() == "cache", "{error}");
}

fn patterns(device: &mut dyn Device, _: Module) {
    let patterns = [Pattern::Bits8(0xa5), Pattern::Bits16(0xbeef), Pattern::Bits32(0x1234_5678)];
    for bytes in [4u64, 1 << 16, (1 << 20) + 4] {
        let [buffer, beside] = ["set", "beside"].map(|what| device.allocate(bytes, what).unwrap());
        for pattern in patterns {
            let expected = pattern.bytes().repeat(bytes as usize / pattern.bytes().len());
            device.fill(buffer, pattern).unwrap();
            assert_eq!(read(device, buffer, bytes as usize), expected, "{pattern:?}");
            device.fill(buffer, Pattern::Bits8(0)).unwrap();
            device.poison(buffer, pattern).unwrap();
            assert_eq!(read(device, buffer, bytes as usize), expected, "{pattern:?}");
        }
        assert!(read(device, beside, bytes as usize).iter().all(|b| *b == 0xff));
    }
    let odd = device.allocate(6, "odd").unwrap();
    device.fill(odd, Pattern::Bits16(0x0102)).unwrap();
    assert_eq!(read(device, odd, 6), [2, 1, 2, 1, 2, 1]);
    let error = device.fill(odd, Pattern::Bits32(0)).unwrap_err();
    assert!(matches!(error.problem(), Problem::Pattern { bytes: 6, pattern: 4 }), "{error}");
    device.check_guards().unwrap();
}

/// Values whose every byte differs, so that a shift or a swap shows.
fn each(device: &mut dyn Device) -> ([Arg; 8], Buffer, [u64; 7]) {
    let input = device.allocate(4, "input").unwrap();
    let out = device.allocate(64, "out").unwrap();
    device.write(input, 0, &0x7172_7374u32.to_le_bytes()).unwrap();
    let (e, f) = (f32::from_bits(0x4142_4344), f64::from_bits(0x5152_5354_5556_5758));
    let arguments = [
        0x8182_8384u32.into(),
        0x9192_9394_9596_9798u64.into(),
        (-0x2122_2324i32).into(),
        (-0x3132_3334_3536_3738i64).into(),
        e.into(),
        f.into(),
        Arg::In(input),
        Arg::Out(out),
    ];
    let expected = [
        0x8182_8384,
        0x9192_9394_9596_9798,
        (-0x2122_2324i64) as u64,
        (-0x3132_3334_3536_3738i64) as u64,
        0x4142_4344,
        0x5152_5354_5556_5758,
        0x7172_7374,
    ];
    (arguments, out, expected)
}

fn check_each(device: &mut dyn Device, out: Buffer, expected: [u64; 7], last: u64) {
    let held: Vec<u64> = read(device, out, 64).as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    assert_eq!(held[..7], expected);
    assert_eq!(held[7], last);
}

fn arguments_of_each_type(device: &mut dyn Device, module: Module) {
    let (arguments, out, expected) = each(device);
    launch(device, module, "take_each", 1, &arguments).unwrap();
    check_each(device, out, expected, 1);
}

fn arguments_as_one_struct(device: &mut dyn Device, module: Module) {
    let (arguments, out, expected) = each(device);
    // One word behind the others: the struct ends in padding.
    let arguments = [&arguments[..], &[0x6162_6364u32.into()]].concat();
    launch(device, module, "take_struct", 1, &arguments).unwrap();
    check_each(device, out, expected, 0x6162_6364);
}

fn axes(device: &mut dyn Device, module: Module) {
    let (grid, block) = ([3, 2, 2], [4, 3, 2]);
    let out = device.allocate(12 * 24 * 4, "places").unwrap();
    let arguments = [Arg::Out(out)];
    let launch = Launch { module, kernel: "place", grid, block, dynamic_shared: 0, arguments: &arguments };
    device.launch(&launch).unwrap();
    let expected: Vec<u32> = (0..12).flat_map(|b| (0..24).map(move |t| b << 16 | t)).collect();
    assert_eq!(words(&read(device, out, 12 * 24 * 4)), expected);
}

/// Without opting in, with it, all that there is, and less again.
fn shared_memory(device: &mut dyn Device, module: Module) {
    let all = device.limits().shared_per_block;
    for bytes in [1024, 48 << 10, (48 << 10) + 4, 64 << 10, all, 2048] {
        let data = some(bytes / 4);
        let [from, to] = ["from", "to"].map(|what| device.allocate(u64::from(bytes), what).unwrap());
        device.write(from, 0, &data).unwrap();
        let arguments = [Arg::In(from), Arg::Out(to), (bytes / 4).into()];
        let (grid, block) = ([1; 3], [256, 1, 1]);
        let launch =
            Launch { module, kernel: "reverse", grid, block, dynamic_shared: bytes, arguments: &arguments };
        device.launch(&launch).unwrap();
        let mut expected = words(&data);
        expected.reverse();
        assert!(words(&read(device, to, bytes as usize)) == expected, "{bytes} bytes");
        let error = device.launch(&Launch { dynamic_shared: all + 1, ..launch }).unwrap_err();
        assert!(matches!(error.problem(), Problem::Exceeded(_)), "{error}");
    }
}

/// More launches than a driver queues; each reads what the one before wrote.
fn launches_in_order(device: &mut dyn Device, module: Module) {
    let data = some(64);
    let buffers = ["a", "b", "c"].map(|what| device.allocate(256, what).unwrap());
    device.write(buffers[0], 0, &data).unwrap();
    for i in 0..1500 {
        let arguments = [Arg::In(buffers[i % 3]), Arg::Out(buffers[(i + 1) % 3]), 64u32.into()];
        launch(device, module, "copy", 64, &arguments).unwrap();
        if i == 700 {
            device.fill(buffers[(i + 2) % 3], Pattern::Bits8(0)).unwrap();
        }
    }
    device.synchronise().unwrap();
    assert_eq!(read(device, buffers[0], 256), data);
    device.check_guards().unwrap();
}

fn refusals(device: &mut dyn Device, module: Module) {
    let [x, y] = ["x", "y"].map(|what| device.allocate(16, what).unwrap());
    let refused = |device: &mut dyn Device, kernel: &str, threads, arguments: &[Arg]| {
        launch(device, module, kernel, threads, arguments).unwrap_err()
    };
    let good = [Arg::In(x), Arg::Out(y), 4u32.into()];
    let error = refused(device, "copy", 4, &[good[0], good[1], 4u64.into()]);
    assert!(matches!(error.problem(), Problem::Layout { bytes: 8, expected_bytes: 4, .. }), "{error}");
    assert!(error.place().contains("argument 2"), "{error}");
    let error = refused(device, "copy", 4, &[good[0], 4u32.into(), good[1]]);
    assert!(matches!(error.problem(), Problem::Layout { bytes: 4, expected_bytes: 8, .. }), "{error}");
    let error = refused(device, "copy", 4, &good[..2]);
    assert!(matches!(error.problem(), Problem::Count { found: 2, expected: 3 }), "{error}");
    let error = refused(device, "copy", 4, &[Arg::In(y), good[1], good[2]]);
    assert!(matches!(error.problem(), Problem::Alias { .. }), "{error}");
    let error = refused(device, "copy", 1025, &good);
    assert!(matches!(error.problem(), Problem::Shape { value: 1025, .. }), "{error}");
    let error = refused(device, "copy", 0, &good);
    assert!(matches!(error.problem(), Problem::Shape { value: 0, .. }), "{error}");
    let error = refused(device, "cpy", 4, &good);
    assert!(error.to_string().contains("copy, hang, place"), "{error}");
    let (arguments, _, _) = each(device);
    let error = refused(device, "take_struct", 1, &arguments);
    assert!(matches!(error.problem(), Problem::Bytes { found: 64, expected: 72 }), "{error}");
    device.free(y).unwrap();
    let error = refused(device, "copy", 4, &good);
    assert!(matches!(error.problem(), Problem::Buffer), "{error}");
    // None of these ran, and the device still does.
    let y = device.allocate(16, "y").unwrap();
    device.fill(x, Pattern::Bits8(0x21)).unwrap();
    launch(device, module, "copy", 4, &[good[0], Arg::Out(y), good[2]]).unwrap();
    assert_eq!(read(device, y, 16), [0x21; 16]);
}
