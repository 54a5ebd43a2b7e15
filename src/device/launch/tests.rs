/*! Checks of launches against the figures of a real CUBIN; `tests/device.rs` has a device in host memory. */

use super::super::Owner;
use super::*;
use crate::nvrtc::Parameter;
use crate::nvrtc::Target;

fn buffers<const N: usize>() -> [Buffer; N] {
    let owner = Owner::unique();
    std::array::from_fn(|i| Buffer::new(owner, i as u32))
}

/// As the fixture's `centre` (two pointers, an int, a float), or with other parameters.
fn kernel(parameters: &[(u32, u32)]) -> Resources {
    Resources {
        kernel: "centre".into(),
        registers: 18,
        frame_bytes: 0,
        spill_store_bytes: Some(0),
        spill_load_bytes: Some(0),
        static_shared_bytes: 128,
        threads_bound: Some(256),
        parameters: parameters.iter().map(|&(offset, bytes)| Parameter { offset, bytes }).collect(),
        parameter_bytes: parameters.last().map_or(0, |p| p.0 + p.1),
        code_bytes: 1,
    }
}

const CENTRE: [(u32, u32); 4] = [(0, 8), (8, 8), (16, 4), (20, 4)];

fn launch(arguments: &[Arg]) -> Launch<'_> {
    let module = Module::new(Owner::unique(), 0);
    Launch { module, kernel: "centre", grid: [4, 1, 1], block: [256, 1, 1], dynamic_shared: 0, arguments }
}

fn limits() -> Limits {
    Limits::of(Target::sm(120)).unwrap()
}

fn error(launch: &Launch<'_>, kernel: &Resources) -> String {
    launch.check(&limits(), Some(kernel)).unwrap_err().to_string()
}

#[test]
fn arguments_that_fit_the_kernel_pass() {
    let [x, y] = buffers();
    let arguments = [Arg::In(x), Arg::Out(y), 7i32.into(), 1.5f32.into()];
    launch(&arguments).check(&limits(), Some(&kernel(&CENTRE))).unwrap();
    launch(&arguments).check(&limits(), None).unwrap();
    // The same fields as one struct by value.
    launch(&arguments).check(&limits(), Some(&kernel(&[(0, 24)]))).unwrap();
    launch(&arguments[1..]).check(&limits(), Some(&kernel(&[(0, 16)]))).unwrap();
    // 20 bytes of fields are a struct of 24.
    let odd = [Arg::In(x), Arg::In(x), 7i32.into()];
    launch(&odd).check(&limits(), Some(&kernel(&[(0, 24)]))).unwrap();
}

#[test]
fn a_wrong_number_size_or_order_is_named() {
    let [x, y] = buffers();
    let good = [Arg::In(x), Arg::Out(y), 7i32.into(), 1.5f32.into()];
    let text = error(&launch(&good[..3]), &kernel(&CENTRE));
    assert!(text.contains("3 arguments were given, but the kernel takes 4"), "{text}");
    let wide = [Arg::In(x), Arg::Out(y), 7u64.into(), 1.5f32.into()];
    let text = error(&launch(&wide), &kernel(&CENTRE));
    assert!(text.contains("argument 2 (from 0)") && text.contains("with 8 bytes"), "{text}");
    let swapped = [Arg::In(x), 7i32.into(), Arg::Out(y), 1.5f32.into()];
    assert!(error(&launch(&swapped), &kernel(&CENTRE)).contains("argument 1 (from 0)"));
    let text = error(&launch(&good), &kernel(&[(0, 32)]));
    assert!(text.contains("take 24 bytes, but the kernel's parameters 32"), "{text}");
    let unlisted = |parameter_bytes| Resources { parameter_bytes, ..kernel(&[]) };
    launch(&good).check(&limits(), Some(&unlisted(24))).unwrap();
    assert!(error(&launch(&good), &unlisted(28)).contains("take 24 bytes"));
}

#[test]
fn a_written_buffer_may_be_passed_once_and_a_read_one_twice() {
    let [x, y] = buffers();
    for written in [Arg::Out(x), Arg::InOut(x)] {
        let twice = [Arg::In(x), written, 7i32.into(), 1.5f32.into()];
        let text = launch(&twice).check(&limits(), None).unwrap_err().to_string();
        assert!(text.contains("argument 1 (from 0)") && text.contains("as argument 0"), "{text}");
    }
    let read = [Arg::In(y), Arg::In(y), 7i32.into(), 1.5f32.into()];
    launch(&read).check(&limits(), Some(&kernel(&CENTRE))).unwrap();
}

#[test]
fn shapes_and_limits_are_checked_before_a_driver_is_asked() {
    let [x, y] = buffers();
    let arguments = [Arg::In(x), Arg::Out(y), 7i32.into(), 1.5f32.into()];
    let good = launch(&arguments);
    let shape = |grid, block| error(&Launch { grid, block, ..good.clone() }, &kernel(&CENTRE));
    assert!(shape([0, 1, 1], [1, 1, 1]).contains("a grid's x of 0"));
    assert!(shape([1, 65_536, 1], [1, 1, 1]).contains("a grid's y of 65536, expected 1 to 65535"));
    assert!(shape([1, 1, 1], [1, 1, 65]).contains("a block's z of 65"));
    assert!(shape([1, 1, 1], [1024, 2, 1]).contains("a block's threads of 2048"));
    assert!(shape([1, 1, 1], [1024, 1024, 64]).contains("a block's threads"));
    assert!(shape([1, 1, 1], [257, 1, 1]).contains("__launch_bounds__"));
    let text = error(&Launch { dynamic_shared: 101_376, ..good.clone() }, &kernel(&CENTRE));
    assert!(text.contains("101504 bytes of shared memory") && text.contains("sm_120"), "{text}");
}

/// The offsets are those that the compiler chose for the fixture's `crowded`: two pointers, a u64, a u32.
#[test]
fn packing_is_that_of_the_compiler() {
    let [x, y] = buffers();
    let owner_address = |b: Buffer| if b == x { 0x1111 } else { 0x2222 };
    let packed = Packed::of(&[Arg::In(x), Arg::Out(y), 3u64.into(), 9u32.into()], owner_address);
    assert_eq!(packed.fields, [(0, 8), (8, 8), (16, 8), (24, 4)]);
    assert_eq!((packed.bytes.len(), packed.padded()), (28, 32));
    assert_eq!((packed.bytes[0], packed.bytes[8], packed.bytes[16], packed.bytes[24]), (0x11, 0x22, 3, 9));
    let mixed = Packed::of(&[1u32.into(), 2u64.into(), (-1i32).into(), 0.5f64.into(), 1.5f32.into()], |_| 0);
    assert_eq!(mixed.fields, [(0, 4), (8, 8), (16, 4), (24, 8), (32, 4)]);
    assert_eq!(mixed.padded(), 40);
    assert_eq!(Packed::of(&[], |_| 0).padded(), 0);
}
