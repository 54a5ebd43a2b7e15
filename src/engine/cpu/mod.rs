//! stub until h3 lands
use super::*;
use mla_numeric::DType;
use mla_reference::Accumulate;
/// stub
pub struct CpuEngine { /// s
 pub accumulate: Accumulate, /// s
 pub seams: Seams }
/// stub
#[derive(Clone,Debug,Default,PartialEq)]
pub struct Seams { /// a
 pub merge_base_e: bool, /// b
 pub no_rescale: bool, /// c
 pub skip_key: Option<usize> }
impl CpuEngine { /// s
 pub fn new(_d: DType, _s: usize) -> Self { CpuEngine{accumulate: Accumulate::Exact, seams: Seams::default()} } }
impl Engine for CpuEngine {
 fn describe(&self)->Description { Description{name:"cpu",device:String::new()} }
 fn contract(&self)->Contract{Contract::exact()}
 fn run(&self, _l:&Layer,_c:&Case,_f:&[Form],_s:&mut dyn Sink)->Result<(),EngineError>{ Err(EngineError::Broke("stub".into())) }
}
