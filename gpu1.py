"""Timings of backward variants. argv: json list of variants"""
import sys, json, time, statistics, os
import torch, triton
import refold, refold.ops
from refold.ops.selective_scan import _triton_backward as TB
from refold.ops.selective_scan import _torch as ST
from refold.ops.selective_scan import _triton as SF
def normal(*s, dtype=torch.float32): return torch.randn(*s, device='cuda').to(dtype)
def time_ms(run, count=15, warmup=3):
    flush = torch.empty(256<<20, dtype=torch.float32, device="cuda")
    for _ in range(warmup): run()
    ev=[]
    for _ in range(count):
        flush.zero_()
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); run(); b.record(); ev.append((a,b))
    torch.cuda.synchronize()
    t=sorted(a.elapsed_time(b) for a,b in ev); return t[len(t)//2]
def case(b,t,d,n,dtype,z=True,g=1):
    torch.manual_seed(0)
    x,dt,zz,dy=(normal(b,t,d,dtype=dtype) for _ in range(4))
    A=-torch.rand(d,n,device='cuda')*4; B,C=(normal(b,t,n,dtype=dtype) for _ in range(2))
    return dict(x=x,dt=dt,A=A,B=B,C=C,D=normal(d),z=zz if z else None,dt_bias=normal(d)-2,decay=None,initial_state=None,cu_seqlens=None,dt_softplus=True,state_dtype=None), dy
PLAN=None
NAMES='x dt A B C D z dt_bias decay initial_state cu_seqlens'.split()
def back(args, dy):
    global PLAN
    if PLAN is None: PLAN=SF.selective_scan_backward.plan(dy=dy, dstate=None, needs=frozenset(), **args)
    return PLAN(dy,None,*[args[n] for n in NAMES])
def ref_err(args, dy, T=512):
    # float64 gradients of the last T tokens of row -1 from zero state? use whole small problem instead
    pass
def main():
    shapes=json.loads(sys.argv[1]); variants=json.loads(sys.argv[2]); out=open(sys.argv[3],'a')
    for sh in shapes:
        b,t,d,n=sh; 
        args,dy=case(b,t,d,n,torch.bfloat16)
        fwd=time_ms(lambda: refold.ops.selective_scan(**{k:v for k,v in args.items()},backend='triton'))
        base=None
        for v in variants:
            TB.TUNED.clear(); TB.TUNED.update(v); globals().__setitem__('PLAN',None)
            try:
                torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); m0=torch.cuda.memory_allocated()
                t0=time.time(); r=back(args,dy); torch.cuda.synchronize(); c=time.time()-t0
                mem=torch.cuda.max_memory_allocated()-m0
                r2=back(args,dy); same=all(torch.equal(r[k],r2[k]) for k in r)
                ms=time_ms(lambda: back(args,dy))
                if base is None: base=r
                diff={k: round(((r[k].double()-base[k].double()).norm()/(base[k].double().norm()+1e-30)).item(),6) for k in r}
                row=dict(shape=sh,v=v,fwd=round(fwd,4),ms=round(ms,4),mem_mib=mem>>20,compile_s=round(c,1),same=same,worst=max(diff.values()))
            except Exception as e:
                row=dict(shape=sh,v=v,err=repr(e)[:300])
            print(json.dumps(row),flush=True); out.write(json.dumps(row)+'\n'); out.flush()
            del r, r2
if __name__=="__main__": main()
