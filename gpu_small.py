"""Correctness of the aligned kernel against float64 torch backend on the GPU, many options; and pointwise backwards timings."""
import sys, itertools, torch, refold.ops, json, time
sys.path.insert(0,'/tmp')
def n(*s,dtype=torch.float32): return torch.randn(*s,device='cuda').to(dtype)
def run(b,t,d,N,g,dtype,z,decay,init,pack,fin,cfg=None,seed=0):
    torch.manual_seed(seed)
    from refold.ops.selective_scan import _triton_backward as TB
    from refold.ops.selective_scan import _triton as SF, _torch as ST
    TB.TUNED.clear(); TB.TUNED.update(cfg or {})
    cu=None; k=b
    if pack: cu=torch.tensor(pack,dtype=torch.int32,device='cuda'); k=len(pack)-1
    a=dict(x=n(b,t,d,dtype=dtype),dt=n(b,t,d,dtype=dtype),A=-torch.exp(torch.rand(d,N,device='cuda')*8-6),B=n(b,t,g,N,dtype=dtype),C=n(b,t,g,N,dtype=dtype),
      D=n(d),z=n(b,t,d,dtype=dtype) if z else None,dt_bias=n(d),decay=(torch.rand(b,t,d,device='cuda')*1.5-.3).to(dtype) if decay else None,
      initial_state=n(k,d,N) if init else None,cu_seqlens=cu,dt_softplus=True,state_dtype=None)
    dy=n(b,t,d,dtype=dtype); ds=n(k,d,N) if fin else None
    got=SF.selective_scan_backward(dy=dy,dstate=ds,needs=frozenset(),**a)
    again=SF.selective_scan_backward(dy=dy,dstate=ds,needs=frozenset(),**a)
    w={k_:v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k_,v in a.items()}
    want=ST.selective_scan_backward(dy=dy.double(),dstate=None if ds is None else ds.double(),needs=frozenset(),**w)
    err={k_: ((got[k_].double()-want[k_]).norm()/want[k_].norm()).item() for k_ in got}
    bit=all(torch.equal(got[k_],again[k_]) for k_ in got)
    tol=4e-3 if dtype==torch.bfloat16 else 2e-5
    bad={k_:f'{v:.1e}' for k_,v in err.items() if not v<=tol}
    print('ok' if not bad and bit else 'BAD',dict(b=b,t=t,d=d,N=N,g=g,dt=str(dtype)[6:],z=z,decay=decay,init=init,pack=pack,fin=fin,cfg=cfg),'worst %.1e'%max(err.values()),bad,'bit',bit,flush=True)
if __name__=='__main__':
    part=int(sys.argv[1]); parts=int(sys.argv[2])
    L=[]
    for dtype in (torch.float32,torch.bfloat16):
        L+=[(2,50,64,16,1,dtype,True,False,False,None,False),(2,77,96,16,2,dtype,True,True,True,None,True),(1,300,64,16,1,dtype,False,False,True,[0,1,1,40,300],True),
            (1,130,128,64,2,dtype,True,True,True,[0,30,130],True),(2,33,48,4,1,dtype,True,False,True,None,False),(1,2100,64,16,1,dtype,True,False,True,None,True),(3,65,80,8,1,dtype,False,True,False,None,True),(2,90,64,32,1,dtype,True,False,False,None,False)]
    cfgs=[dict(keep=1),dict(keep=0,warps=2)]
    for i,(l,c) in enumerate(itertools.product(L,cfgs)):
        if i%parts==part:
            try: run(*l,cfg=c)
            except Exception as e: print('BAD',l,c,repr(e)[:600],flush=True)
