import sys, json, torch, itertools, statistics
import refold.ops
from gpu1 import time_ms, normal
from refold.ops.causal_conv1d import _triton as CC
from refold.ops.gated_rmsnorm import _triton as RN
from refold.ops.linear_scan import _triton as LS
from refold.ops.selective_scan import _triton as SF
bf=torch.bfloat16
def rate():
    a=torch.empty(1<<32,dtype=torch.uint8,device='cuda'); b=torch.empty_like(a); return 2**33/time_ms(lambda: b.copy_(a))/1e9
R=rate(); print('copy TB/s',R)
def rep(name, run, moved, **kw):
    try:
        ms=time_ms(run); print(name,kw,'ms %.4f'%ms,'share %.3f'%(moved/ms/1e9/R),flush=True)
    except Exception as e: print(name,kw,'ERR',repr(e)[:300],flush=True)
x,dy=(normal(8,4096,5376,dtype=bf) for _ in range(2)); w=normal(5376,4); bi=normal(5376)
moved=3*x.nbytes
for rows,bd,tiles,progs in [(8,64,16,32),(8,64,32,32),(8,64,8,32),(8,128,16,32),(8,128,32,16),(4,64,32,32),(4,128,32,32),(16,64,16,32)]:
    CC.BACKWARD_ROWS,CC.BACKWARD_BLOCK_D,CC.BACKWARD_TILES,CC.BACKWARD_PROGRAMS=rows,bd,tiles,progs; CC.causal_conv1d_backward.plans.clear()
    rep('conv',lambda: CC.causal_conv1d_backward(dy=dy,dstate=None,needs=frozenset(),x=x,weight=w,bias=bi,initial_state=None,cu_seqlens=None,activation='silu'),moved,v=(rows,bd,tiles,progs))
rep('conv fwd',lambda: refold.ops.causal_conv1d(x,w,bi,activation='silu'),2*x.nbytes)
del x,dy
x,z,dy=(normal(32768,5120,dtype=bf) for _ in range(3)); w=normal(5120)
for pw in (8,16,32,64):
    RN.PROGRAM_WARPS=pw; RN.gated_rmsnorm_backward.plans.clear()
    for nf in (False,True):
        rep('norm',lambda: RN.gated_rmsnorm_backward(dy=dy,needs=frozenset(),x=x,z=z,weight=w,eps=1e-5,group_size=None,norm_before_gate=nf),5*x.nbytes,pw=pw,nf=nf)
rep('norm fwd',lambda: refold.ops.gated_rmsnorm(x,z,w,eps=1e-5),3*x.nbytes)
del x,z,dy
for b,t,d in ((1,2048,5120),(8,2048,5120),(1,32768,5120)):
    a=torch.rand(b,t,d,device='cuda').to(bf); x,dy=(normal(b,t,d,dtype=bf) for _ in range(2))
    rep('lscan',lambda: LS.linear_scan_backward(dh=dy,dstate=None,needs=frozenset(),a=a,x=x,initial_state=None,cu_seqlens=None,reverse=False),5*x.nbytes,shape=(b,t,d))
    rep('lscan fwd',lambda: refold.ops.linear_scan(a,x),3*x.nbytes,shape=(b,t,d))
